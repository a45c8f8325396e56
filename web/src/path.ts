// The choice of lam: groups that fuse as it grows, the cross-validation curve, the chosen level.
import { line } from "d3-shape";
import { extent, room, withDownload } from "./chart";
import type { Model } from "./data";
import { el, fmt, plural, section, svg } from "./dom";
import { lineChart } from "./lines";
import { groupColour, onLook } from "./theme";

export function pathSection(model: Model): HTMLElement | null {
  const path = model.payload.path;
  if (!path) return null;
  const { choice, groups } = path;
  const rule =
    choice?.rule === "1se"
      ? "the largest level within one standard error of the best"
      : "the level with the smallest error";
  const about = choice
    ? `The penalty level lam sets how strongly neighbours are shrunk towards each other. Cross-validation within sites chose ${rule}.`
    : "The penalty level lam sets how strongly neighbours are shrunk towards each other.";
  const holder = el("div", { class: "columns" });
  const draw = (): void => {
    holder.replaceChildren(
      ...[choice && curve(choice, path.lam), groups && fusion(model, groups, path.lam)].filter(
        (one): one is HTMLElement => Boolean(one),
      ),
    );
  };
  onLook(draw);
  draw();
  return section("path", "How lam was chosen", about, holder);
}

/** The part of a chart that depends on lam: its axis, and a mark at the chosen level. */
function alongLam(lams: number[], lam: number | null) {
  const positive = lams.filter((one) => one > 0);
  const domain: [number, number] = [Math.min(...positive) / 1.1, Math.max(...positive) * 1.1];
  return {
    size: [room(520), 300] as [number, number],
    x: { domain, title: "lam: more sharing to the right", log: true },
    mark: lam && lam > 0 ? { at: lam, words: `lam = ${fmt(lam)}` } : null,
  };
}

function curve(choice: { lams: number[]; mean: number[]; error: number[] }, lam: number | null): HTMLElement {
  const low = choice.mean.map((one, k) => one - (choice.error[k] ?? 0));
  const high = choice.mean.map((one, k) => one + (choice.error[k] ?? 0));
  const { chart } = lineChart([{ name: "held-out loss", at: choice.lams, mean: choice.mean, low, high }], {
    ...alongLam(choice.lams, lam),
    label: `Held-out loss along lam; the chosen level is ${fmt(lam)}`,
    y: { domain: extent([...low, ...high]), title: "held-out loss" },
    points: true,
  });
  const words = "The line is the mean over folds, the band one standard error.";
  return el("figure", {}, withDownload(chart, "cross-validation"), el("figcaption", {}, words));
}

/** A line for each site: lines of one group run together. */
function fusion(
  model: Model,
  groups: { lams: number[]; counts: number[]; labels: number[][] | null },
  lam: number | null,
): HTMLElement {
  const { rank, n } = model;
  const first = groups.counts[groups.counts.length - 1];
  const last = groups.counts[0];
  const most = groups.labels ? Math.max(n - 1, 1) : Math.max(...groups.counts);
  const counted = { name: "groups", at: groups.lams, mean: groups.counts };
  const { chart, x, y } = lineChart(groups.labels ? [] : [counted], {
    ...alongLam(groups.lams, lam),
    label: `Groups along lam: from ${first} at the smallest level to ${last} at the largest`,
    y: { domain: [0, most], title: groups.labels ? "" : "groups of equal parameters" },
  });
  if (groups.labels) {
    const heights = groups.labels.map((labels) => {
      const sums = new Map<number, [number, number]>();
      labels.forEach((label, site) => {
        const sum = sums.get(label) ?? [0, 0];
        sums.set(label, [sum[0] + rank[site], sum[1] + 1]);
      });
      return labels.map((label) => {
        const [sum, count] = sums.get(label)!;
        return sum / count;
      });
    });
    const kept = groups.lams.map((_, k) => k).filter((k) => groups.lams[k] > 0);
    const thin = n > 120 ? 0.6 : n > 40 ? 1 : 1.5;
    for (let site = 0; site < n; site++) {
      const path = line<number>()
        .x((k) => x(groups.lams[k]))
        .y((k) => y(heights[k][site]));
      const stroke = groupColour(model.groups[site], model.payload.resolved);
      const style = { fill: "none", stroke, "stroke-width": thin, opacity: n > 120 ? 0.5 : 0.75 };
      chart.append(svg("path", { d: path(kept) ?? "", ...style }));
    }
  }
  const counts = `${plural(first, "group")} at the smallest level, ${last} at the largest.`;
  const words = groups.labels
    ? `One line per site; lines meet where sites have the same parameters. ${counts}`
    : counts;
  return el("figure", {}, withDownload(chart, "path"), el("figcaption", {}, words));
}
