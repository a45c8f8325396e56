// What sharing is worth: the methods side by side, then who gains and who loses.
import { scaleLinear } from "d3-scale";
import { bottomAxis, cutAt, extent, picture, room } from "./chart";
import type { Comparison, Model } from "./data";
import { el, fmt, plural, section, svg } from "./dom";
import { Pager } from "./pager";
import type { State } from "./state";

const MEANING: Record<string, string> = {
  Local: "each site alone",
  Global: "one model for all",
  "Site intercepts": "one model, own levels",
  Fedkin: "kin share",
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
    "What sharing is worth",
    `${better}: ${found.metric} on rows that no method saw${share ? `; ${share.trim()}` : ""}.${found.methods.some((one) => one.name === "Oracle") ? "" : " Every method is tuned."}`,
    el("div", { class: "columns" }, methodsChart(found), gains(model, found)),
    siteTable(model, found, state),
    moreTable(found),
  );
}

function methodsChart(found: Comparison): HTMLElement {
  const methods = found.methods;
  const width = room(520);
  const row = 44;
  const left = 156;
  const bottom = 12 + row * methods.length;
  const best = (found.lower_is_better ? Math.min : Math.max)(...methods.flatMap((one) => one.mean ?? []));
  const most = cutAt(methods.map((one) => (one.mean ?? best) - best));
  const cut = (one: Comparison["methods"][number]): boolean => Math.abs((one.mean ?? best) - best) > most;
  const ends = methods.flatMap((one) => {
    const error = one.standard_error ?? 0;
    return one.mean === null || cut(one) ? [] : [one.mean - error, one.mean + error];
  });
  const x = scaleLinear()
    .domain(extent(ends, 0.12))
    .nice(4)
    .range([left, width - 64]);
  const label = methods.map((one) => `${one.name} ${fmt(one.mean)}`).join(", ");
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
      const [end, side] = one.mean > best ? [width - 64, 1] : [left, -1];
      chart.append(
        svg("path", { d: `M${end + 10 * side} ${y}l${-12 * side} -6v12z`, class: "dot cut" }),
        svg(
          "text",
          { x: end - 8 * side, y: y + 4, "text-anchor": side > 0 ? "end" : "start", class: "value" },
          fmt(one.mean),
        ),
      );
      return;
    }
    const error = one.standard_error ?? 0;
    chart.append(
      svg("line", { x1: x(one.mean - error), x2: x(one.mean + error), y1: y, y2: y, class: `whisker ${strong}` }),
      svg("circle", { cx: x(one.mean), cy: y, r: strong ? 7 : 5.5, class: `dot ${strong}` }),
      svg("text", { x: x(one.mean + error) + 12, y: y + 4, class: `value ${strong}` }, fmt(one.mean)),
    );
  });
  const words = `Dots are means, lines one standard error.${methods.some(cut) ? " An arrow is a method far outside the picture." : ""}`;
  return el("figure", {}, chart, el("figcaption", {}, words));
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

function gains(model: Model, found: Comparison): HTMLElement | null {
  const values = gainOverLocal(found);
  if (!values) return null;
  const sorted = values
    .map((value, site) => ({ value, site }))
    .filter((one): one is { value: number; site: number } => one.value !== null)
    .sort((a, b) => b.value - a.value);
  const gain = sorted.filter((one) => one.value > 0).length;
  const loss = sorted.filter((one) => one.value < 0).length;
  const width = room(520);
  const height = 44 * found.methods.length + 12;
  const most = cutAt(sorted.map((one) => one.value));
  const shown = (value: number): number => Math.min(Math.max(value, -most), most);
  const y = scaleLinear()
    .domain(extent([0, ...sorted.map((one) => shown(one.value))], 0.04))
    .range([height, 12]);
  const label = `${gain} sites gain over going alone, ${loss} lose`;
  const chart = picture(width, height + 44, label);
  const step = (width - 20) / Math.max(sorted.length, 1);
  const ups: string[] = [];
  const downs: string[] = [];
  sorted.forEach((one, k) => {
    const x = 10 + step * k;
    const w = Math.max(step - (step > 4 ? 1.5 : 0), 0.8);
    const bar = `M${x.toFixed(2)} ${y(0).toFixed(2)}h${w.toFixed(2)}V${y(shown(one.value)).toFixed(2)}h-${w.toFixed(2)}z`;
    (one.value >= 0 ? ups : downs).push(bar);
  });
  const cut = sorted.filter((one) => Math.abs(one.value) > most);
  chart.append(
    svg("path", { d: ups.join(""), class: "gain" }),
    svg("path", { d: downs.join(""), class: "loss" }),
    svg("line", { x1: 10, x2: width - 10, y1: y(0), y2: y(0), class: "zero" }),
    ...cutBars(
      cut,
      (one) => 10 + step * (sorted.indexOf(one) + 0.5),
      (value) => y(shown(value)),
    ),
  );
  const best = sorted[0];
  const worst = sorted[sorted.length - 1];
  const praise = best && best.value > 0 ? `${model.names[best.site]}: ${fmt(best.value)} better` : "";
  const blame =
    worst && worst.value < 0 && worst !== best ? `${model.names[worst.site]}: ${fmt(-worst.value)} worse` : "";
  const below = height + ((praise.length + blame.length) * 6.5 > width - 40 && praise ? 38 : 20);
  if (praise) chart.append(svg("text", { x: 10, y: height + 20, class: "hint" }, praise));
  if (blame) chart.append(svg("text", { x: width - 10, y: below, "text-anchor": "end", class: "hint" }, blame));
  const even = sorted.length - gain - loss;
  const words = `${plural(gain, "site")} gain over going alone, ${loss} lose${even ? `, ${even} stay equal` : ""}; one bar per site.${cut.length ? ` Bars with an arrow are longer than drawn.` : ""}`;
  return el("figure", {}, chart, el("figcaption", {}, words));
}

interface Bar {
  value: number;
  site: number;
}

/** Arrows at the ends of bars that are cut, and how long these are: one number, or from which to which. */
function cutBars(cut: Bar[], at: (one: Bar) => number, end: (value: number) => number): SVGElement[] {
  const out: SVGElement[] = [];
  for (const side of [1, -1]) {
    const bars = cut.filter((one) => Math.sign(one.value) === side);
    if (!bars.length) continue;
    const tip = end(bars[0].value);
    for (const one of bars) {
      out.push(
        svg("path", { d: `M${at(one)} ${tip - 8 * side}l-5 ${9 * side}h10z`, class: side > 0 ? "gain" : "loss" }),
      );
    }
    const [least, largest] = side > 0 ? [bars[bars.length - 1], bars[0]] : [bars[0], bars[bars.length - 1]];
    const words = bars.length > 1 ? `${fmt(least.value)} to ${fmt(largest.value)}` : fmt(largest.value);
    const x = side > 0 ? at(bars[bars.length - 1]) + 10 : at(bars[0]) - 10;
    out.push(
      svg("text", { x, y: tip + (side > 0 ? 6 : 2), "text-anchor": side > 0 ? "start" : "end", class: "hint" }, words),
    );
  }
  return out;
}

function siteTable(model: Model, found: Comparison, state: State): HTMLElement | null {
  const methods = Object.keys(found.sites);
  if (!methods.length) return null;
  const gain = gainOverLocal(found);
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
        text: (site: number) => fmt(found.sites[name][site]),
        key: (site: number) => found.sites[name][site] ?? Number.NaN,
        number: true,
      })),
      ...(gain
        ? [
            {
              title: "Gain over Local",
              text: (site: number) => signed(gain[site]),
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
  return el(
    "details",
    { class: "more" },
    el("summary", {}, `All ${plural(model.n, "site")}: who gains, who loses`),
    pager.element,
  );
}

const signed = (value: number | null): string => (value === null ? "–" : value > 0 ? `+${fmt(value)}` : fmt(value));

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
      ...found.methods.map((one) => el("td", { class: "number" }, fmt(values[one.name]))),
    ),
  );
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Other measures" },
    el("table", { class: "plain" }, el("thead", {}, head), el("tbody", {}, ...lines)),
  );
}
