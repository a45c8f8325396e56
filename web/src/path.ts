// How the choice of lam came about: groups that fuse as it grows, the cross-validation curve, the chosen point.
import { scaleLinear, scaleLog } from "d3-scale";
import { area, line } from "d3-shape";
import { extent, leftAxis, picture, room } from "./chart";
import type { Model } from "./data";
import { el, fmt, plural, section, svg, tick } from "./dom";
import { groupColour, onTheme } from "./theme";

const WIDTH = room(520);
const LEFT = 58;
const RIGHT = WIDTH - 14;

export function pathSection(model: Model): HTMLElement | null {
  const path = model.payload.path;
  if (!path) return null;
  const { choice, groups } = path;
  const rule =
    choice?.rule === "1se"
      ? "the largest level within one standard error of the best"
      : "the level with the least error";
  const about = choice
    ? `The penalty level lam decides how strongly neighbours pull at each other. Cross-validation within sites took ${rule}.`
    : "The penalty level lam decides how strongly neighbours pull at each other.";
  const holder = el("div", { class: "columns" });
  const draw = (): void => {
    holder.replaceChildren(
      ...[choice && curve(choice, path.lam), groups && fusion(model, groups, path.lam)].filter(
        (one): one is HTMLElement => Boolean(one),
      ),
    );
  };
  onTheme(draw);
  draw();
  return section("path", "How lam was chosen", about, holder);
}

function lamAxis(x: ReturnType<typeof scaleLog<number, number>>, top: number, bottom: number): SVGGElement {
  const group = svg("g", { class: "axis" });
  let last = Number.NEGATIVE_INFINITY;
  for (const value of lamTicks(...(x.domain() as [number, number]))) {
    const at = x(value);
    group.append(svg("line", { x1: at, x2: at, y1: top, y2: bottom }));
    if (at - last < 44) continue;
    last = at;
    group.append(svg("text", { x: at, y: bottom + 16, "text-anchor": "middle" }, tick(value)));
  }
  group.append(
    svg(
      "text",
      { x: (LEFT + RIGHT) / 2, y: bottom + 34, "text-anchor": "middle", class: "title" },
      "lam: more sharing to the right",
    ),
  );
  return group;
}

/** Powers of ten, and two and five times them where there are fewer than three. */
function lamTicks(low: number, high: number): number[] {
  const powers: number[] = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.floor(Math.log10(high)); power++) powers.push(power);
  const inside = (steps: number[]): number[] =>
    powers.flatMap((power) => steps.map((step) => step * 10 ** power)).filter((one) => one >= low && one <= high);
  const whole = inside([1]);
  return whole.length >= 3 ? whole : inside([1, 2, 5]);
}

function lamScale(lams: number[]): ReturnType<typeof scaleLog<number, number>> {
  const positive = lams.filter((one) => one > 0);
  const [low, high] = [Math.min(...positive), Math.max(...positive)];
  return scaleLog()
    .domain([low / 1.1, high * 1.1])
    .range([LEFT, RIGHT]);
}

function chosenMark(at: number, top: number, bottom: number, lam: number): SVGGElement {
  return svg(
    "g",
    { class: "mark" },
    svg("line", { x1: at, x2: at, y1: top, y2: bottom }),
    svg("text", { x: at, y: top - 8, "text-anchor": at > (LEFT + RIGHT) / 2 ? "end" : "start" }, `lam = ${fmt(lam)}`),
  );
}

function curve(choice: { lams: number[]; mean: number[]; error: number[] }, lam: number | null): HTMLElement {
  const points = choice.lams
    .map((value, k) => ({ lam: value, mean: choice.mean[k], error: choice.error[k] ?? 0 }))
    .filter((one) => one.lam > 0 && one.mean !== null);
  const height = 300;
  const [top, bottom] = [34, height - 44];
  const x = lamScale(points.map((one) => one.lam));
  const y = scaleLinear()
    .domain(extent(points.flatMap((one) => [one.mean - one.error, one.mean + one.error])))
    .nice(4)
    .range([bottom, top]);
  const chart = picture(WIDTH, height, `Held-out loss along lam; the chosen level is ${fmt(lam)}`);
  const band = area<(typeof points)[0]>()
    .x((one) => x(one.lam))
    .y0((one) => y(one.mean - one.error))
    .y1((one) => y(one.mean + one.error));
  const middle = line<(typeof points)[0]>()
    .x((one) => x(one.lam))
    .y((one) => y(one.mean));
  chart.append(
    lamAxis(x, top, bottom),
    leftAxis(y, LEFT, RIGHT, "held-out loss"),
    svg("path", { d: band(points) ?? "", class: "band" }),
    svg("path", { d: middle(points) ?? "", class: "curve" }),
  );
  for (const one of points) chart.append(svg("circle", { cx: x(one.lam), cy: y(one.mean), r: 2.5, class: "point" }));
  if (lam && lam > 0) {
    chart.append(chosenMark(x(lam), top, bottom, lam));
  }
  return el("figure", {}, chart, el("figcaption", {}, "The line is the mean over folds, the band one standard error."));
}

/** A line for each site: lines of one group run together. */
function fusion(
  model: Model,
  groups: { lams: number[]; counts: number[]; labels: number[][] | null },
  lam: number | null,
): HTMLElement {
  const height = 300;
  const [top, bottom] = [34, height - 44];
  const x = lamScale(groups.lams);
  const kept = groups.lams.map((value, k) => ({ value, k })).filter((one) => one.value > 0);
  const first = groups.counts[groups.counts.length - 1];
  const last = groups.counts[0];
  const chart = picture(
    WIDTH,
    height,
    `Groups along lam: from ${first} at the smallest level to ${last} at the largest`,
  );
  chart.append(lamAxis(x, top, bottom));
  if (groups.labels) {
    const { rank, n } = model;
    const y = scaleLinear()
      .domain([0, Math.max(n - 1, 1)])
      .range([top + 6, bottom - 6]);
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
    const thin = n > 120 ? 0.6 : n > 40 ? 1 : 1.5;
    for (let site = 0; site < n; site++) {
      const path = line<{ value: number; k: number }>()
        .x((one) => x(one.value))
        .y((one) => y(heights[one.k][site]));
      chart.append(
        svg("path", {
          d: path(kept) ?? "",
          fill: "none",
          stroke: groupColour(model.groups[site], model.payload.resolved),
          "stroke-width": thin,
          opacity: n > 120 ? 0.5 : 0.75,
        }),
      );
    }
  } else {
    const y = scaleLinear()
      .domain([0, Math.max(...groups.counts)])
      .nice(4)
      .range([bottom, top]);
    const steps = line<{ value: number; k: number }>()
      .x((one) => x(one.value))
      .y((one) => y(groups.counts[one.k]));
    chart.append(
      leftAxis(y, LEFT, RIGHT, "groups of equal parameters"),
      svg("path", { d: steps(kept) ?? "", class: "curve" }),
    );
  }
  if (lam && lam > 0) chart.append(chosenMark(x(lam), top, bottom, lam));
  const words = groups.labels
    ? `One line per site; lines meet where sites have the same parameters. ${plural(first, "group")} at the smallest level, ${last} at the largest.`
    : `${plural(first, "group")} at the smallest level, ${last} at the largest.`;
  return el("figure", {}, chart, el("figcaption", {}, words));
}
