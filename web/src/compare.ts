// What sharing gains: the methods next to each other, then the gain at every site.
import { scaleLinear } from "d3-scale";
import { bottomAxis, cutAt, extent, narrow, picture, room, valueOn, withDownload } from "./chart";
import type { Comparison, Model } from "./data";
import { choice, csvButton, decimalsFor, el, fixed, plural, scroll, section, svg, table, whole } from "./dom";
import { signed, siteDots, twoEnds } from "./dots";
import { Pager, siteColumns } from "./pager";
import type { State } from "./state";
import { onLook } from "./theme";

const MEANING: Record<string, string> = {
  Local: "each site alone",
  Global: "one model for all",
  "Site intercepts": "one model, own levels",
  Fedkin: "sites share",
  "Graph as given": "edges not tested",
  Oracle: "knows the true groups",
};

export function compareSection(model: Model, state: State): HTMLElement | null {
  const found = model.payload.comparison;
  if (!found) return null;
  const splits = (found.repeats ?? 1) > 1 ? `, ${plural(found.repeats ?? 1, "split")}` : "";
  const share = found.test_size
    ? `${Math.round(100 * found.test_size)}% of each site’s rows were held out${splits}`
    : "";
  return section(
    "comparison",
    "What sharing gains",
    `Lower is better: ${found.metric} on held-out rows${share ? `; ${share.trim()}` : ""}.${found.methods.some((one) => one.name === "Oracle") ? "" : " Every method is tuned."}`,
    methodsFigure(found),
    gainsChart(model, found, state),
    siteTable(model, found, state),
    moreTable(found),
  );
}

/** Decimals for the errors of the methods, from their standard errors. */
function methodDecimals(found: Comparison): number {
  const errors = found.methods.flatMap((one) => [one.standard_error, one.difference_error]);
  const values = found.methods.map((one) => one.mean);
  return decimalsFor(errors, values);
}

function methodsFigure(found: Comparison): HTMLElement {
  const place = el("div");
  const caption = el("figcaption");
  const paired = found.methods.some((one) => one.difference_error);
  const lines = paired ? " Lines are one standard error of the difference from Fedkin, on the same rows." : "";
  const draw = (): void => {
    const chart = methodsChart(found);
    const beyond = chart.querySelector(".cut") ? " An arrow marks a method beyond the axis." : "";
    caption.textContent = `Dots are means.${lines}${beyond}`;
    place.replaceChildren(withDownload(chart, "methods"));
  };
  draw();
  onLook(draw);
  return el("figure", {}, place, caption);
}

function methodsChart(found: Comparison): SVGSVGElement {
  const methods = found.methods;
  const width = room();
  const row = 44;
  const left = narrow() ? 118 : 156;
  const bottom = 12 + row * methods.length;
  const best = Math.min(...methods.flatMap((one) => one.mean ?? []));
  const most = cutAt(methods.map((one) => (one.mean ?? best) - best));
  const ends = methods.flatMap((one) => {
    const error = one.difference_error ?? 0;
    return one.mean === null || Math.abs(one.mean - best) > most ? [] : [one.mean - error, one.mean + error];
  });
  const x = scaleLinear()
    .domain(extent(ends, 0.08))
    .nice(10)
    .range([left, width - 84]);
  // only a method outside the axis, as it was rounded, is drawn as an arrow
  const [low, high] = x.domain();
  const cut = (one: Comparison["methods"][number]): boolean => one.mean !== null && (one.mean < low || one.mean > high);
  const decimals = methodDecimals(found);
  const label = methods.map((one) => `${one.name} ${fixed(one.mean, decimals)}`).join(", ");
  const chart = picture(width, bottom + 44, `${found.metric}: ${label}`);
  chart.append(bottomAxis(x, 8, bottom, found.metric, 4));
  methods.forEach((one, k) => {
    const y = 12 + row * (k + 0.5);
    const strong = one.name === "Fedkin" ? "strong" : "";
    const name = { x: left - 14, y: narrow() ? y + 4 : y - 1, "text-anchor": "end", class: `name ${strong}` };
    chart.append(svg("text", name, one.name));
    if (!narrow()) {
      const place = { x: left - 14, y: y + 14, "text-anchor": "end", class: "hint" };
      chart.append(svg("text", place, MEANING[one.name] ?? ""));
    }
    if (one.mean === null) return;
    if (cut(one)) {
      const [end, side] = one.mean > best ? [width - 84, 1] : [left, -1];
      chart.append(
        svg("path", { d: `M${end + 10 * side} ${y}l${-12 * side} -6v12z`, class: "dot cut" }),
        svg(
          "text",
          { x: end - 8 * side, y: y + 4, "text-anchor": side > 0 ? "end" : "start", class: "value" },
          valueOn(x, one.mean, decimals),
        ),
      );
      return;
    }
    const error = one.difference_error ?? 0;
    const [from, to] = [Math.max(one.mean - error, low), Math.min(one.mean + error, high)];
    chart.append(
      svg("line", { x1: x(from), x2: x(to), y1: y, y2: y, class: `whisker ${strong}` }),
      svg("circle", { cx: x(one.mean), cy: y, r: strong ? 7 : 5.5, class: `dot ${strong}` }),
      svg("text", { x: x(to) + 12, y: y + 4, class: `value ${strong}` }, valueOn(x, one.mean, decimals)),
    );
  });
  return chart;
}

function gainsChart(model: Model, found: Comparison, state: State): HTMLElement | null {
  const values = found.gains;
  if (!values) return null;
  const all = values
    .map((value, site) => ({ site, value: value ?? Number.NaN, half: 2 * (found.gain_errors?.[site] ?? 0) }))
    .filter((one) => Number.isFinite(one.value))
    .sort((a, b) => b.value - a.value);
  if (!all.length) return null;
  const gain = all.filter((one) => one.value > 0).length;
  const loss = all.filter((one) => one.value < 0).length;
  const sure = (sign: number): number => all.filter((one) => one.half > 0 && sign * one.value > one.half).length;
  const even = all.length - gain - loss;
  const known = all.some((one) => one.half > 0);
  const told = (sites: number, sign: number): string => (known ? `${sites} (${sure(sign)} clearly)` : `${sites}`);
  const words = [
    `${told(gain, 1)} of ${plural(all.length, "site")} ${gain === 1 ? "gains" : "gain"} over their own models, ${told(loss, -1)} ${loss === 1 ? "loses" : "lose"}${even ? `, ${even} stay equal` : ""}.`,
    found.constant.length
      ? `At ${plural(found.constant.length, "site")} held-out rows cannot decide, as all rows have the same target.`
      : "",
    known ? "Lines are two standard errors either way." : "",
  ];
  const caption = el("figcaption");
  const ends = twoEnds(all);
  let byName = false;
  const place = el("div");
  const decimals = decimalsFor(
    found.gain_errors ?? [],
    all.map((one) => one.value),
  );
  const draw = (): void => {
    const some = [...ends.some];
    if (byName) some.sort((a, b) => model.names[a.site].localeCompare(model.names[b.site], "en", { numeric: true }));
    const dots = some.map(({ site, value, half }) => ({
      site,
      value,
      low: half ? value - half : null,
      high: half ? value + half : null,
    }));
    const chart = siteDots(model, state, dots, {
      label: `Gain of ${plural(some.length, "site")} over their own models; the table below has the numbers.`,
      title: `reduction of ${found.metric}`,
      decimals,
      line: { at: 0, class: "zero" },
      signed: true,
      left: byName ? 0 : ends.left,
    });
    if (chart.querySelector(".cut")) words[3] = "An arrow marks a site beyond the axis.";
    caption.textContent = `${words.filter(Boolean).join(" ")}${ends.words}`;
    place.replaceChildren(withDownload(chart, "gains"));
  };
  draw();
  onLook(draw);
  const order = choice(
    "Order of the sites",
    [
      ["By gain", false],
      ["By name", true],
    ],
    byName,
    (on) => {
      byName = on;
      draw();
    },
  );
  const title = el("h3", {}, "Gain of each site over its own model");
  return el("figure", { class: "gains" }, el("div", { class: "bar" }, title, order), place, caption);
}

function siteTable(model: Model, found: Comparison, state: State): HTMLElement | null {
  const given = Object.keys(found.sites);
  if (!given.length) return null;
  const methods = [...given.filter((one) => one === "Fedkin"), ...given.filter((one) => one !== "Fedkin")];
  const gain = found.gains;
  const decimals = decimalsFor(
    found.gain_errors ?? [],
    methods.flatMap((name) => found.sites[name]),
  );
  const pager = new Pager(model, state, {
    caption: `${found.metric} at each site`,
    columns: [
      ...siteColumns(model),
      {
        title: "Rows",
        text: (site) => whole(model.payload.sites.rows[site]),
        csv: (site) => model.payload.sites.rows[site],
        key: (site) => model.payload.sites.rows[site],
        number: true,
      },
      ...methods.map((name) => ({
        title: name,
        text: (site: number) => fixed(found.sites[name][site], decimals),
        csv: (site: number) => found.sites[name][site] ?? "",
        key: (site: number) => found.sites[name][site] ?? Number.NaN,
        number: true,
      })),
      ...(gain
        ? [
            {
              title: "Gain over Local",
              text: (site: number) => signed(gain[site], decimals),
              csv: (site: number) => gain[site] ?? "",
              key: (site: number) => gain[site] ?? Number.NaN,
              number: true,
              tone: (site: number) => ((gain[site] ?? 0) > 0 ? "gain" : (gain[site] ?? 0) < 0 ? "loss" : ""),
            },
          ]
        : []),
    ],
    sort: gain ? "Gain over Local" : "Site",
    descending: Boolean(gain),
  });
  return el("details", { class: "more" }, el("summary", {}, `Errors at all ${plural(model.n, "site")}`), pager.element);
}

function moreTable(found: Comparison): HTMLElement | null {
  const metrics = Object.entries(found.more);
  if (!metrics.length) return null;
  const lines = found.methods.map((one) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, one.name),
      ...metrics.map(([, values]) => el("td", { class: "number" }, fixed(values[one.name], 3))),
    ),
  );
  const heads = ["Also measured", ...metrics.map(([metric]) => metric)];
  const made = table("Other measures", heads, el("tbody", {}, ...lines));
  return el("div", { class: "other" }, scroll("Other measures", made), csvButton("other measures", made));
}
