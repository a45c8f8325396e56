// Coefficients as a forest: one feature over groups and sites, or all features of one site; and two sites compared.
import { scaleLinear } from "d3-scale";
import { bottomAxis, extent, picture, room } from "./chart";
import type { Model } from "./data";
import { el, fmt, fresh, plural, section, svg } from "./dom";
import { Pager } from "./pager";
import type { State } from "./state";
import { groupColour, onTheme } from "./theme";

const MOST_GROUPS = 14;
const MOST_FEATURES = 30;

export function coefficientsSection(model: Model, state: State): HTMLElement {
  const { level, left_out } = model.payload.coefficients;
  const target = model.payload.about.target;
  const intervals = model.halves
    ? `Lines of sites are ${Math.round(100 * level)}% intervals.`
    : "A fused model has no intervals.";
  const of = target ? `Effects on ${target}, ` : "Effects ";
  const scales: Record<string, string> = { logit: "as log-odds ", softmax: "as log-odds ", log: "as log ratios " };
  const scale = `${scales[model.payload.about.link ?? ""] ?? ""}per unit of a column`;
  const note = left_out
    ? ` The ${plural(left_out, "coefficient")} that differ least between sites are not on this page.`
    : "";
  return section(
    "coefficients",
    "What each site’s model says",
    `${of}${scale}. ${intervals}${note}`,
    oneFeature(model, state),
    oneSite(model, state),
  );
}

/** The name of a coefficient with its unit. */
export function titleOf(model: Model, feature: number): string {
  const { names, units } = model.payload.coefficients;
  return units[feature] ? `${names[feature]} (per ${units[feature]})` : names[feature];
}

function featureSelect(model: Model, id: string, first: number): HTMLSelectElement {
  const select = el("select", { id });
  model.payload.coefficients.names.forEach((_, k) => {
    select.append(el("option", { value: k, selected: k === first }, titleOf(model, k)));
  });
  return select;
}

/** The coefficient that differs most between groups, or between sites where there are none, for what is known of it. */
function mostVaried(model: Model): number {
  const { spread, mean, names } = model.payload.coefficients;
  let best = 0;
  let most = -1;
  names.forEach((name, k) => {
    if (name.startsWith("(intercept)") && names.length > 1) return;
    const half = model.halves ? averageHalf(model, k) : Math.abs(mean[k] ?? 0) || 1;
    const ratio = (model.payload.resolved ? betweenGroups(model, k) : (spread[k] ?? 0)) / (half || 1e-12);
    if (ratio > most) {
      most = ratio;
      best = k;
    }
  });
  return best;
}

/** Standard deviation of the groups' means, sites counting equally. */
function betweenGroups(model: Model, feature: number): number {
  let [count, sum, squares] = [0, 0, 0];
  for (const members of model.members) {
    const value = members.reduce((total, site) => total + model.estimate(site, feature), 0) / members.length;
    count += members.length;
    sum += members.length * value;
    squares += members.length * value * value;
  }
  return Math.sqrt(Math.max(squares / count - (sum / count) ** 2, 0));
}

function averageHalf(model: Model, feature: number): number {
  let sum = 0;
  for (let site = 0; site < model.n; site++) sum += model.half(site, feature) ?? 0;
  return sum / Math.max(model.n, 1);
}

interface Domain {
  low: number;
  high: number;
}

function domainOf(model: Model, feature: number): Domain {
  const ends: number[] = [0];
  for (let site = 0; site < model.n; site++) {
    const value = model.estimate(site, feature);
    const half = model.half(site, feature) ?? 0;
    if (Number.isFinite(half)) ends.push(value - half, value + half);
    else ends.push(value);
  }
  const [low, high] = extent(ends, 0.03);
  return { low, high };
}

/** An interval as a small picture: a line, a dot, and where zero is. */
function interval(value: number, half: number | null, domain: Domain, tint: string): SVGSVGElement {
  const width = 260;
  const x = scaleLinear()
    .domain([domain.low, domain.high])
    .range([4, width - 4])
    .clamp(true);
  const drawn = svg("svg", { viewBox: `0 0 ${width} 18`, width, height: 18, class: "interval", "aria-hidden": true });
  drawn.append(svg("line", { x1: x(0), x2: x(0), y1: 0, y2: 18, class: "zero" }));
  if (half !== null && Number.isFinite(half)) {
    drawn.append(
      svg("line", {
        x1: x(value - half),
        x2: x(value + half),
        y1: 9,
        y2: 9,
        stroke: tint,
        "stroke-width": 2,
        "stroke-linecap": "round",
      }),
    );
  }
  drawn.append(svg("circle", { cx: x(value), cy: 9, r: 4, fill: tint }));
  return drawn;
}

function oneFeature(model: Model, state: State): HTMLElement {
  const id = fresh("feature");
  let feature = mostVaried(model);
  const select = featureSelect(model, id, feature);
  const groups = el("div", { class: "forest" });
  let domain = domainOf(model, feature);
  const columns = (): ConstructorParameters<typeof Pager>[2]["columns"] => [
    { title: "Site", text: (site) => model.names[site], key: (site) => model.names[site], site: true },
    {
      title: "Group",
      text: (site) => model.groupName(model.groups[site]),
      key: (site) => model.groups[site],
      group: true,
    },
    {
      title: "Estimate",
      text: (site) => fmt(model.estimate(site, feature)),
      key: (site) => model.estimate(site, feature),
      number: true,
    },
    {
      title: model.halves ? "Interval" : "Rows",
      text: (site) => (model.halves ? ends(model, site, feature) : String(model.payload.sites.rows[site])),
      key: (site) => (model.halves ? (model.half(site, feature) ?? 0) : model.payload.sites.rows[site]),
      number: true,
    },
    {
      title: "Picture",
      text: () => "",
      key: (site) => model.estimate(site, feature),
      draw: (site) =>
        interval(
          model.estimate(site, feature),
          model.half(site, feature),
          domain,
          groupColour(model.groups[site], model.payload.resolved),
        ),
    },
  ];
  const pager = new Pager(model, state, {
    caption: "Estimates at each site",
    columns: columns(),
    sort: 2,
    descending: true,
  });
  const draw = (): void => {
    domain = domainOf(model, feature);
    groups.replaceChildren(groupForest(model, feature, domain));
    pager.change({ columns: columns() });
  };
  select.addEventListener("change", () => {
    feature = Number(select.value);
    draw();
  });
  onTheme(draw);
  draw();
  return el(
    "div",
    { class: "block" },
    el("div", { class: "bar" }, el("label", { for: id }, "Coefficient"), select),
    groups,
    el(
      "details",
      { class: "more", open: model.n <= 60 },
      el("summary", {}, `All ${plural(model.n, "site")}`),
      pager.element,
    ),
  );
}

function ends(model: Model, site: number, feature: number): string {
  const half = model.half(site, feature);
  if (half === null || !Number.isFinite(half)) return "–";
  const value = model.estimate(site, feature);
  return `${fmt(value - half)} to ${fmt(value + half)}`;
}

/** The population and each group: mean of the sites' estimates, and from the least to the largest. */
function groupForest(model: Model, feature: number, domain: Domain): HTMLElement {
  const { mean, spread } = model.payload.coefficients;
  interface Line {
    name: string;
    hint: string;
    value: number;
    low: number;
    high: number;
    tint: string | null;
  }
  const lines: Line[] = [];
  const average = mean[feature] ?? 0;
  const wide = spread[feature] ?? 0;
  lines.push({
    name: "All sites",
    hint: `spread ${fmt(wide)}`,
    value: average,
    low: average - wide,
    high: average + wide,
    tint: null,
  });
  if (model.payload.resolved) {
    model.members.slice(0, MOST_GROUPS).forEach((members, group) => {
      const values = members.map((site) => model.estimate(site, feature));
      const value = values.reduce((sum, one) => sum + one, 0) / values.length;
      lines.push({
        name: model.groupName(group),
        hint: plural(members.length, "site"),
        value,
        low: Math.min(...values),
        high: Math.max(...values),
        tint: groupColour(group),
      });
    });
  }
  const width = room(760);
  const row = 34;
  const narrow = width < 560;
  const left = narrow ? 84 : 190;
  const bottom = 10 + row * lines.length;
  const x = scaleLinear()
    .domain([domain.low, domain.high])
    .nice(5)
    .range([left, width - (narrow ? 62 : 90)]);
  const label = `${titleOf(model, feature)}: ${lines.map((one) => `${one.name} ${fmt(one.value)}`).join(", ")}`;
  const chart = picture(width, bottom + 44, label);
  chart.append(bottomAxis(x, 4, bottom, titleOf(model, feature), narrow ? 3 : 6));
  chart.append(svg("line", { x1: x(0), x2: x(0), y1: 4, y2: bottom, class: "zero" }));
  lines.forEach((one, k) => {
    const y = 10 + row * (k + 0.5);
    const tint = one.tint ?? "currentColor";
    chart.append(
      svg("text", { x: 0, y: y + 4, class: "name" }, one.name),
      svg("text", { x: left - 14, y: y + 4, "text-anchor": "end", class: "hint" }, narrow ? "" : one.hint),
      svg("line", {
        x1: x(one.low),
        x2: x(one.high),
        y1: y,
        y2: y,
        stroke: tint,
        "stroke-width": 3,
        "stroke-linecap": "round",
        opacity: 0.55,
      }),
      one.tint === null
        ? svg("path", { d: `M${x(one.value)} ${y - 7}l7 7l-7 7l-7 -7z`, fill: tint })
        : svg("circle", { cx: x(one.value), cy: y, r: 6, fill: tint }),
      svg("text", { x: width, y: y + 4, "text-anchor": "end", class: "value" }, fmt(one.value)),
    );
  });
  const more = model.members.length - MOST_GROUPS;
  const rest = model.payload.resolved && more > 0 ? ` ${plural(more, "smaller group")} not drawn.` : "";
  const caption = model.payload.resolved
    ? `A group’s dot is the mean of its sites’ estimates, its line reaches from the least to the largest. For all sites the line is one spread either way.${rest}`
    : "The diamond is the population of sites, its line one spread between sites either way.";
  return el(
    "figure",
    {},
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Groups" }, chart),
    el("figcaption", {}, caption),
  );
}

// --- one site, or two ------------------------------------------------------------------------------------------

function siteInput(model: Model, id: string, list: string): HTMLInputElement {
  return el("input", {
    id,
    type: "search",
    list: model.n <= 1000 ? list : null,
    autocomplete: "off",
    placeholder: "name of a site",
  });
}

function oneSite(model: Model, state: State): HTMLElement {
  const list = fresh("names");
  const ids = [fresh("first"), fresh("second")];
  const inputs = ids.map((id) => siteInput(model, id, list));
  const byName = new Map(model.names.map((name, site) => [name.toLowerCase(), site]));
  const chosen: (number | null)[] = defaults(model);
  const body = el("div", { class: "forest" });
  const draw = (): void => {
    inputs.forEach((input, k) => {
      const site = chosen[k];
      if (site !== null) input.value = model.names[site];
    });
    body.replaceChildren(siteForest(model, chosen[0], chosen[1]));
  };
  inputs.forEach((input, k) => {
    input.addEventListener("change", () => {
      const site = byName.get(input.value.trim().toLowerCase());
      chosen[k] = site ?? (k === 1 && !input.value.trim() ? null : chosen[k]);
      draw();
    });
  });
  let last: number | null = null;
  state.listen(({ chosen: site }) => {
    if (site === null || site === last) return;
    last = site;
    if (chosen[1] === site) chosen[1] = chosen[0];
    chosen[0] = site;
    draw();
  });
  onTheme(draw);
  draw();
  return el(
    "div",
    { class: "block", id: "difference" },
    el("h3", {}, model.n > 1 ? "Two sites side by side" : "The site"),
    el(
      "div",
      { class: "bar" },
      el("label", { for: ids[0] }, "Site"),
      inputs[0],
      ...(model.n > 1 ? [el("label", { for: ids[1] }, "against"), inputs[1]] : []),
      model.n <= 1000
        ? el("datalist", { id: list }, ...model.names.map((name) => el("option", { value: name })))
        : null,
    ),
    body,
  );
}

function defaults(model: Model): (number | null)[] {
  if (model.n === 1) return [0, null];
  if (model.payload.resolved && model.members.length > 1) return [model.members[0][0], model.members[1][0]];
  const order = model.payload.order;
  return [order[0], order[order.length - 1]];
}

function siteForest(model: Model, first: number | null, second: number | null): HTMLElement {
  if (first === null) return el("p", { class: "hint" }, "Choose a site.");
  const all = model.payload.coefficients.names.map((_, k) => k);
  const difference = (k: number): number =>
    second === null ? 0 : model.estimate(first, k) - model.estimate(second, k);
  const sure = (k: number): number => {
    const half = second === null ? null : model.halfOfDifference(first, second, k);
    return half === null ? Math.abs(difference(k)) : Math.abs(difference(k)) / (half || 1e-12);
  };
  if (second !== null) all.sort((a, b) => sure(b) - sure(a));
  const shown = all.slice(0, MOST_FEATURES);
  const head = el(
    "tr",
    {},
    el("th", { scope: "col" }, "Coefficient"),
    second === null ? null : el("th", { scope: "col", class: "number" }, "Difference"),
    ...(second === null ? [first] : [first, second]).map((site) =>
      el("th", { scope: "col", class: "number" }, model.names[site]),
    ),
    el("th", { scope: "col" }, "Picture"),
  );
  const lines = shown.map((k) => {
    const domain = pairDomain(model, first, second, k);
    const cells = [el("th", { scope: "row" }, titleOf(model, k))];
    if (second !== null) {
      const half = model.halfOfDifference(first, second, k);
      const value = difference(k);
      const apart = half !== null && Math.abs(value) > half;
      cells.push(
        el("td", { class: `number ${apart ? "apart" : ""}` }, fmt(value), small(half === null ? "" : `± ${fmt(half)}`)),
      );
    }
    for (const site of second === null ? [first] : [first, second]) {
      cells.push(el("td", { class: "number" }, fmt(model.estimate(site, k)), small(ends(model, site, k))));
    }
    cells.push(el("td", {}, pairPicture(model, first, second, k, domain)));
    return el("tr", {}, ...cells);
  });
  const rest = all.length > shown.length ? ` The first ${shown.length} of ${all.length} are shown.` : "";
  const level = Math.round(100 * model.payload.coefficients.level);
  const how = model.knowsDifferences
    ? "The interval counts what the two sites share only once, so kin differ by less than their own intervals suggest."
    : "Approximate: the page has too many sites to hold what each two of them share, and takes them as independent, which is too wide for kin. fedkin inspect MODEL --contrast A B has the exact interval.";
  const words =
    second === null
      ? ""
      : model.halves
        ? `Sorted by how surely they differ; bold where the ${level}% interval of the difference leaves out zero. ${how}${rest}`
        : `Sorted by the size of the difference.${rest}`;
  return el(
    "div",
    {},
    el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Coefficients of the chosen sites" },
      el(
        "table",
        {},
        el(
          "caption",
          { class: "quiet" },
          second === null
            ? `Coefficients of ${model.names[first]}`
            : `${model.names[first]} against ${model.names[second]}`,
        ),
        el("thead", {}, head),
        el("tbody", {}, ...lines),
      ),
    ),
    el("p", { class: "hint" }, words),
  );
}

const small = (words: string): HTMLElement | null => (words && words !== "–" ? el("small", {}, words) : null);

function pairDomain(model: Model, first: number, second: number | null, feature: number): Domain {
  const ends = [0];
  for (const site of second === null ? [first] : [first, second]) {
    const half = model.half(site, feature) ?? 0;
    const value = model.estimate(site, feature);
    ends.push(value - (Number.isFinite(half) ? half : 0), value + (Number.isFinite(half) ? half : 0));
  }
  const [low, high] = extent(ends, 0.05);
  return { low, high };
}

function pairPicture(model: Model, first: number, second: number | null, feature: number, domain: Domain): Element {
  const width = 260;
  const x = scaleLinear()
    .domain([domain.low, domain.high])
    .range([6, width - 6])
    .clamp(true);
  const drawn = svg("svg", { viewBox: `0 0 ${width} 26`, width, height: 26, class: "interval", "aria-hidden": true });
  drawn.append(svg("line", { x1: x(0), x2: x(0), y1: 0, y2: 26, class: "zero" }));
  const sites = second === null ? [first] : [first, second];
  sites.forEach((site, k) => {
    const y = sites.length === 1 ? 13 : 8 + 10 * k;
    const value = model.estimate(site, feature);
    const half = model.half(site, feature);
    const tint = groupColour(model.groups[site], model.payload.resolved);
    if (half !== null && Number.isFinite(half)) {
      drawn.append(
        svg("line", {
          x1: x(value - half),
          x2: x(value + half),
          y1: y,
          y2: y,
          stroke: tint,
          "stroke-width": 2,
          "stroke-linecap": "round",
        }),
      );
    }
    drawn.append(
      svg("circle", { cx: x(value), cy: y, r: 4, fill: k ? "var(--paper)" : tint, stroke: tint, "stroke-width": 2 }),
    );
  });
  return drawn;
}
