// What sharing gains: the methods next to each other, then the gain at every site.
import { scaleLinear } from "d3-scale";
import { bottomAxis, cutAt, extent, picture, room, withDownload } from "./chart";
import type { Comparison, Model } from "./data";
import { decimalsFor, el, fixed, plural, section, svg } from "./dom";
import { Pager } from "./pager";
import type { State } from "./state";
import { onTheme } from "./theme";

const MEANING: Record<string, string> = {
  Local: "each site alone",
  Global: "one model for all",
  "Site intercepts": "one model, own levels",
  Fedkin: "sites share",
  "Graph as given": "edges not tested",
  Oracle: "told the true groups",
};

export function compareSection(model: Model, state: State): HTMLElement | null {
  const found = model.payload.comparison;
  if (!found) return null;
  const splits = (found.repeats ?? 1) > 1 ? `, ${plural(found.repeats ?? 1, "split")}` : "";
  const share = found.test_size
    ? `${Math.round(100 * found.test_size)}% of each site’s rows were held out${splits}`
    : "";
  const better = found.lower_is_better ? "Lower is better" : "Higher is better";
  return section(
    "comparison",
    "What sharing gains",
    `${better}: ${found.metric} on rows that no method saw${share ? `; ${share.trim()}` : ""}.${found.methods.some((one) => one.name === "Oracle") ? "" : " Every method is tuned."}`,
    methodsChart(found),
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

function methodsChart(found: Comparison): HTMLElement {
  const methods = found.methods;
  const width = room(760);
  const row = 44;
  const left = 156;
  const bottom = 12 + row * methods.length;
  const best = (found.lower_is_better ? Math.min : Math.max)(...methods.flatMap((one) => one.mean ?? []));
  const most = cutAt(methods.map((one) => (one.mean ?? best) - best));
  const ends = methods.flatMap((one) => {
    const error = one.standard_error ?? 0;
    return one.mean === null || Math.abs(one.mean - best) > most ? [] : [one.mean - error, one.mean + error];
  });
  const x = scaleLinear()
    .domain(extent(ends, 0.12))
    .nice(4)
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
    chart.append(
      svg("text", { x: left - 14, y: y - 1, "text-anchor": "end", class: `name ${strong}` }, one.name),
      svg("text", { x: left - 14, y: y + 14, "text-anchor": "end", class: "hint" }, MEANING[one.name] ?? ""),
    );
    if (one.mean === null) return;
    if (cut(one)) {
      const [end, side] = one.mean > best ? [width - 84, 1] : [left, -1];
      chart.append(
        svg("path", { d: `M${end + 10 * side} ${y}l${-12 * side} -6v12z`, class: "dot cut" }),
        svg(
          "text",
          { x: end - 8 * side, y: y + 4, "text-anchor": side > 0 ? "end" : "start", class: "value" },
          fixed(one.mean, decimals),
        ),
      );
      return;
    }
    const error = one.standard_error ?? 0;
    const [from, to] = [Math.max(one.mean - error, low), Math.min(one.mean + error, high)];
    chart.append(
      svg("line", { x1: x(from), x2: x(to), y1: y, y2: y, class: `whisker ${strong}` }),
      svg("circle", { cx: x(one.mean), cy: y, r: strong ? 7 : 5.5, class: `dot ${strong}` }),
      svg("text", { x: x(to) + 12, y: y + 4, class: `value ${strong}` }, fixed(one.mean, decimals)),
    );
  });
  const words = `Dots are means, lines one standard error.${methods.some(cut) ? " An arrow marks a method beyond the axis." : ""}`;
  return el("figure", {}, withDownload(chart, "methods"), el("figcaption", {}, words));
}

/** Gain of Fedkin over Local at every site, positive where Fedkin is better. */
export function gainOverLocal(found: Comparison): (number | null)[] | null {
  const mine = found.sites.Fedkin;
  const alone = found.sites.Local;
  if (!mine || !alone) return null;
  const sign = found.lower_is_better ? 1 : -1;
  return mine.map((value, site) => {
    const other = alone[site];
    return value === null || other === null ? null : sign * (other - value);
  });
}

interface Gain {
  site: number;
  value: number;
  /** Half of the bar: two standard errors. */
  half: number;
}

/** Sites whose gain is drawn with a name; of more, those that gain most and those that lose most. */
const MOST_NAMED = 60;

function gainsChart(model: Model, found: Comparison, state: State): HTMLElement | null {
  const values = gainOverLocal(found);
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
    `${told(gain, 1)} of ${plural(all.length, "site")} gain over their own models, ${told(loss, -1)} lose${even ? `, ${even} stay equal` : ""}.`,
    known ? "Lines are two standard errors either way." : "",
    all.length > MOST_NAMED
      ? `${MOST_NAMED} of ${all.length} sites are drawn: those that gain most and those that lose most.`
      : "",
  ];
  const caption = el("figcaption", {}, words.filter(Boolean).join(" "));
  let byName = false;
  const place = el("div");
  const draw = (): void => {
    const some = all.length > MOST_NAMED ? [...all.slice(0, MOST_NAMED / 2), ...all.slice(-MOST_NAMED / 2)] : [...all];
    if (byName) some.sort((a, b) => model.names[a.site].localeCompare(model.names[b.site], "en", { numeric: true }));
    place.replaceChildren(withDownload(gainDots(model, found, some, state), "gains"));
  };
  const press = (words: string, on: boolean): HTMLElement => {
    const button = el("button", { type: "button", "aria-pressed": String(byName === on) }, words);
    button.addEventListener("click", () => {
      byName = on;
      for (const one of order.querySelectorAll("button")) one.setAttribute("aria-pressed", String(one === button));
      draw();
    });
    return button;
  };
  const order = el("span", { class: "choice", role: "group", "aria-label": "Order of the sites" });
  order.append(press("By gain", false), press("By name", true));
  draw();
  onTheme(draw);
  const title = el("h3", {}, "Gain over a model of its own, site by site");
  return el("figure", { class: "gains" }, el("div", { class: "bar" }, title, order), place, caption);
}

function gainDots(model: Model, found: Comparison, sites: Gain[], state: State): SVGSVGElement {
  const width = room(760);
  const row = sites.length > 30 ? 15 : 20;
  const longest = Math.max(...sites.map((one) => shortName(model, one.site).length));
  const left = Math.min(16 + 6.6 * longest, 0.42 * width);
  const bottom = 8 + row * sites.length;
  const most = cutAt(sites.map((one) => one.value));
  const shown = (value: number): number => Math.min(Math.max(value, -most), most);
  const ends = sites.flatMap((one) => [shown(one.value), shown(one.value - one.half), shown(one.value + one.half)]);
  const x = scaleLinear()
    .domain(extent([0, ...ends], 0.04))
    .nice(5)
    .range([left, width - 76]);
  const [low, high] = x.domain();
  const inside = (value: number): number => x(Math.min(Math.max(value, low), high));
  const decimals = decimalsFor(
    found.gain_errors ?? [],
    sites.map((one) => one.value),
  );
  const title = `${found.lower_is_better ? "reduction" : "increase"} of ${found.metric}`;
  const summary = `Gain of ${plural(sites.length, "site")} over their own models; the table below has the numbers.`;
  const chart = picture(width, bottom + 44, summary);
  chart.append(bottomAxis(x, 4, bottom, title, width < 500 ? 3 : 6));
  chart.append(svg("line", { x1: x(0), x2: x(0), y1: 4, y2: bottom, class: "zero" }));
  sites.forEach((one, k) => {
    const y = 8 + row * (k + 0.5);
    const tone = one.value >= 0 ? "gain" : "loss";
    const words = `${model.names[one.site]}: ${signed(one.value, decimals)}${one.half ? ` ± ${fixed(one.half, decimals)}` : ""}`;
    const beyond = one.value > high ? 1 : one.value < low ? -1 : 0;
    const end = inside(one.value);
    const line = svg(
      "g",
      { class: `pick ${tone}`, "data-site": one.site },
      svg("title", {}, words),
      svg("rect", { x: 0, y: y - row / 2, width, height: row, class: "catch" }),
      svg("text", { x: left - 10, y: y + 4, "text-anchor": "end", class: "hint" }, shortName(model, one.site)),
      one.half
        ? svg("line", {
            x1: inside(one.value - one.half),
            x2: inside(one.value + one.half),
            y1: y,
            y2: y,
            class: "whisker",
          })
        : null,
      beyond
        ? svg("path", { d: `M${end + 6 * beyond} ${y}l${-10 * beyond} -5v10z`, class: "cut" })
        : one.value >= 0
          ? svg("circle", { cx: end, cy: y, r: 4 })
          : svg("path", { d: `M${end} ${y - 5}l5 5l-5 5l-5 -5z` }),
      svg("text", { x: width, y: y + 4, "text-anchor": "end", class: "value" }, signed(one.value, decimals)),
    );
    line.addEventListener("click", () => state.choose(one.site));
    line.addEventListener("mouseenter", () => state.hover(one.site));
    line.addEventListener("mouseleave", () => state.hover(null));
    chart.append(line);
  });
  return chart;
}

const shortName = (model: Model, site: number): string => {
  const name = model.names[site];
  return name.length > 24 ? `${name.slice(0, 23)}…` : name;
};

function siteTable(model: Model, found: Comparison, state: State): HTMLElement | null {
  const methods = Object.keys(found.sites);
  if (!methods.length) return null;
  const gain = gainOverLocal(found);
  const decimals = decimalsFor(
    found.gain_errors ?? [],
    methods.flatMap((name) => found.sites[name]),
  );
  const pager = new Pager(model, state, {
    caption: `${found.metric} at each site`,
    columns: [
      { title: "Site", text: (site) => model.names[site], key: (site) => model.names[site], site: true },
      {
        title: "Group",
        text: (site) => model.groupName(model.groups[site]),
        key: (site) => model.groups[site],
        group: true,
      },
      {
        title: "Rows",
        text: (site) => String(model.payload.sites.rows[site]),
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
              tone: (site: number) => ((gain[site] ?? 0) > 0 ? "up" : (gain[site] ?? 0) < 0 ? "down" : ""),
            },
          ]
        : []),
    ],
    sort: gain ? methods.length + 3 : 0,
    descending: Boolean(gain),
  });
  return el("details", { class: "more" }, el("summary", {}, `Errors at all ${plural(model.n, "site")}`), pager.element);
}

const signed = (value: number | null, decimals: number): string =>
  value !== null && value > 0 ? `+${fixed(value, decimals)}` : fixed(value, decimals);

function moreTable(found: Comparison): HTMLElement | null {
  const metrics = Object.entries(found.more);
  if (!metrics.length) return null;
  const head = el(
    "tr",
    {},
    el("th", { scope: "col" }, "Also measured"),
    ...found.methods.map((one) => el("th", { scope: "col", class: "number" }, one.name)),
  );
  const lines = metrics.map(([metric, values]) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, metric),
      ...found.methods.map((one) => el("td", { class: "number" }, fixed(values[one.name], 3))),
    ),
  );
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Other measures" },
    el("table", { class: "plain" }, el("thead", {}, head), el("tbody", {}, ...lines)),
  );
}
