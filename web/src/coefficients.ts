// Coefficients as a forest: one feature over groups and sites, or all features of one site; and two sites compared.
import { scaleLinear } from "d3-scale";
import { bottomAxis, extent, picture, room, withDownload } from "./chart";
import type { Model } from "./data";
import { decimalsFor, el, fixed, fresh, plural, section, svg } from "./dom";
import { Pager } from "./pager";
import type { State } from "./state";
import { groupColour, groupShape, onTheme } from "./theme";

const MOST_GROUPS = 14;
const MOST_FEATURES = 30;

export function coefficientsSection(model: Model, state: State): HTMLElement {
  const { level, left_out } = model.payload.coefficients;
  const target = model.payload.about.target;
  const effects = new Effects(model);
  const intervals = model.halves
    ? `Lines are ${Math.round(100 * level)}% intervals.`
    : "A fused model has no intervals.";
  const { classes } = model.payload.about;
  const what = target === null ? "" : classes?.length === 2 ? ` on ${target} = ${classes[1]}` : ` on ${target}`;
  const note = left_out
    ? ` ${plural(left_out, "coefficient")} that hardly differ between sites are not on this page.`
    : "";
  return section(
    "coefficients",
    "Effects at each site",
    `Effects${what}. ${intervals}${note}`,
    effects.controls(),
    model.payload.resolved || model.n === 1 ? null : rankedStrip(model, state, effects),
    oneFeature(model, state, effects),
    oneSite(model, state, effects),
  );
}

/** How effects are shown: per unit or per standard deviation of a column, added or as ratios. */
class Effects {
  perDeviation = false;
  ratio = false;
  private readonly listeners: (() => void)[] = [];

  constructor(readonly model: Model) {}

  /** What ratios are called; null where effects only add up. */
  get ratioName(): string | null {
    const { link, loss } = this.model.payload.about;
    if (link === "logit" || link === "softmax") return "odds ratio";
    return link === "log" ? (loss === "cox" ? "hazard ratio" : "ratio") : null;
  }

  /** Where an effect of nothing lies. */
  get none(): number {
    return this.ratio ? 1 : 0;
  }

  private factor(feature: number): number {
    return this.perDeviation ? (this.model.payload.coefficients.deviations?.[feature] ?? 1) : 1;
  }

  show(value: number, feature: number): number {
    const scaled = value * this.factor(feature);
    return this.ratio ? Math.exp(scaled) : scaled;
  }

  /** An estimate with the ends of its interval, if it has one. */
  at(site: number, feature: number): { value: number; low: number | null; high: number | null } {
    const value = this.model.estimate(site, feature);
    const half = this.model.half(site, feature);
    const known = half !== null && Number.isFinite(half);
    return {
      value: this.show(value, feature),
      low: known ? this.show(value - half, feature) : null,
      high: known ? this.show(value + half, feature) : null,
    };
  }

  /** Decimals for a coefficient: two digits of a typical half width. */
  decimals(feature: number): number {
    const all = this.model.names.map((_, site) => this.at(site, feature));
    const halves = all
      .map((one) => (one.low === null || one.high === null ? 0 : (one.high - one.low) / 2))
      .sort((a, b) => a - b);
    return decimalsFor(
      [halves[halves.length >> 1]],
      all.map((one) => one.value),
    );
  }

  title(feature: number): string {
    const { names, units, deviations } = this.model.payload.coefficients;
    if (this.perDeviation && deviations?.[feature]) return `${names[feature]} (per standard deviation)`;
    return units[feature] ? `${names[feature]} (per ${units[feature]})` : names[feature];
  }

  listen(listener: () => void): void {
    this.listeners.push(listener);
  }

  /** Buttons to choose; null where there is nothing to choose. */
  controls(): HTMLElement | null {
    const { deviations } = this.model.payload.coefficients;
    const choice = (label: string, words: [string, string], set: (second: boolean) => void): HTMLElement => {
      const group = el("span", { class: "choice", role: "group", "aria-label": label });
      words.forEach((word, k) => {
        const button = el("button", { type: "button", "aria-pressed": String(k === 0) }, word);
        button.addEventListener("click", () => {
          for (const one of group.querySelectorAll("button")) one.setAttribute("aria-pressed", String(one === button));
          set(k === 1);
          for (const listener of this.listeners) listener();
        });
        group.append(button);
      });
      return group;
    };
    const all = [
      deviations &&
        choice("Unit of effects", ["per unit", "per standard deviation"], (second) => {
          this.perDeviation = second;
        }),
      this.ratioName &&
        choice(
          "Scale of effects",
          [this.ratioName === "odds ratio" ? "log-odds" : "logarithm", this.ratioName],
          (second) => {
            this.ratio = second;
          },
        ),
    ].filter((one): one is HTMLElement => Boolean(one));
    return all.length ? el("div", { class: "bar" }, ...all) : null;
  }
}

function featureSelect(effects: Effects, id: string, first: number): HTMLSelectElement {
  const select = el("select", { id });
  effects.model.payload.coefficients.names.forEach((name, k) => {
    select.append(el("option", { value: k, selected: k === first }, name));
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

function domainOf(effects: Effects, feature: number, sites: number[], pad = 0.03): Domain {
  const ends = [effects.none];
  for (const site of sites) {
    const { value, low, high } = effects.at(site, feature);
    ends.push(value, low ?? value, high ?? value);
  }
  const [low, high] = extent(ends, pad);
  return { low, high };
}

/** Intervals of one or two sites as a small picture: lines, marks, and where there is no effect. */
function intervals(effects: Effects, sites: number[], feature: number, domain: Domain): SVGSVGElement {
  const { model } = effects;
  const width = 260;
  const height = sites.length > 1 ? 26 : 18;
  const x = scaleLinear()
    .domain([domain.low, domain.high])
    .range([6, width - 6])
    .clamp(true);
  const drawn = svg("svg", {
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    class: "interval",
    "aria-hidden": true,
  });
  drawn.append(svg("line", { x1: x(effects.none), x2: x(effects.none), y1: 0, y2: height, class: "zero" }));
  sites.forEach((site, k) => {
    const y = sites.length > 1 ? 8 + 10 * k : 9;
    const { value, low, high } = effects.at(site, feature);
    const [group, resolved] = [model.groups[site], model.payload.resolved];
    const tint = groupColour(group, resolved);
    if (low !== null && high !== null) {
      const line = {
        x1: x(low),
        x2: x(high),
        y1: y,
        y2: y,
        stroke: tint,
        "stroke-width": 2,
        "stroke-linecap": "round",
      };
      drawn.append(svg("line", line));
    }
    const fill = k ? "var(--paper)" : tint;
    const mark = { d: groupShape(group, 4, resolved), transform: `translate(${x(value)} ${y})`, fill, stroke: tint };
    drawn.append(svg("path", { ...mark, "stroke-width": k ? 2 : 0 }));
  });
  return drawn;
}

/** Sites whose distance from the average is drawn; of more, the two ends. */
const MOST_RANKED = 80;

/** Every site's effect in order, with intervals, next to the average: the picture where there are no groups. */
function rankedStrip(model: Model, state: State, effects: Effects): HTMLElement {
  const feature = mostVaried(model);
  const place = el("div");
  const all = model.names
    .map((_, site) => site)
    .sort((a, b) => model.estimate(b, feature) - model.estimate(a, feature));
  const sites = all.length > MOST_RANKED ? [...all.slice(0, MOST_RANKED / 2), ...all.slice(-MOST_RANKED / 2)] : all;
  const draw = (): void => {
    const width = room(760);
    const row = sites.length > 30 ? 13 : 18;
    const longest = Math.max(...sites.map((site) => model.names[site].length));
    const left = Math.min(16 + 6.6 * Math.min(longest, 24), 0.42 * width);
    const bottom = 8 + row * sites.length;
    const domain = domainOf(effects, feature, sites);
    const x = scaleLinear()
      .domain([domain.low, domain.high])
      .nice(5)
      .range([left, width - 12]);
    const chart = picture(width, bottom + 44, `${effects.title(feature)} at ${plural(sites.length, "site")}, in order`);
    chart.append(bottomAxis(x, 4, bottom, effects.title(feature), width < 500 ? 3 : 6));
    const average = x(effects.show(model.payload.coefficients.mean[feature] ?? 0, feature));
    chart.append(svg("line", { x1: average, x2: average, y1: 4, y2: bottom, class: "average" }));
    const decimals = effects.decimals(feature);
    sites.forEach((site, k) => {
      const y = 8 + row * (k + 0.5);
      const { value, low, high } = effects.at(site, feature);
      const name = model.names[site];
      const range = low === null || high === null ? "" : ` (${fixed(low, decimals)} to ${fixed(high, decimals)})`;
      const line = svg(
        "g",
        { class: "pick", "data-site": site },
        svg("title", {}, `${name}: ${fixed(value, decimals)}${range}`),
        svg("rect", { x: 0, y: y - row / 2, width, height: row, class: "catch" }),
        svg(
          "text",
          { x: left - 10, y: y + 4, "text-anchor": "end", class: "hint" },
          name.length > 24 ? `${name.slice(0, 23)}…` : name,
        ),
        low === null || high === null ? null : svg("line", { x1: x(low), x2: x(high), y1: y, y2: y, class: "whisker" }),
        svg("circle", { cx: x(value), cy: y, r: 3.6, class: "point" }),
      );
      line.addEventListener("click", () => state.choose(site));
      line.addEventListener("mouseenter", () => state.hover(site));
      line.addEventListener("mouseleave", () => state.hover(null));
      chart.append(line);
    });
    place.replaceChildren(withDownload(chart, "sites"));
  };
  draw();
  effects.listen(draw);
  onTheme(draw);
  const name = model.payload.coefficients.names[feature];
  const some =
    all.length > sites.length
      ? ` ${sites.length} of ${all.length} sites are drawn, those farthest from the average.`
      : "";
  const words = `Sites in order of ${name}, the coefficient that differs most between them. The dashed line is the average of all sites.${some}`;
  return el("figure", { class: "ranked" }, place, el("figcaption", {}, words));
}

function oneFeature(model: Model, state: State, effects: Effects): HTMLElement {
  const id = fresh("feature");
  let feature = mostVaried(model);
  const select = featureSelect(effects, id, feature);
  const all = model.names.map((_, site) => site);
  let decimals = effects.decimals(feature);
  const groups = el("div", { class: "forest" });
  let domain = domainOf(effects, feature, all);
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
      text: (site) => fixed(effects.at(site, feature).value, decimals),
      csv: (site) => effects.at(site, feature).value,
      key: (site) => model.estimate(site, feature),
      number: true,
    },
    {
      title: model.halves ? "Interval" : "Rows",
      text: (site) => (model.halves ? ends(effects, site, feature, decimals) : String(model.payload.sites.rows[site])),
      key: (site) => (model.halves ? (model.half(site, feature) ?? 0) : model.payload.sites.rows[site]),
      number: true,
    },
    {
      title: "Picture",
      text: () => "",
      key: (site) => model.estimate(site, feature),
      draw: (site) => intervals(effects, [site], feature, domain),
    },
  ];
  const pager = new Pager(model, state, {
    caption: "Estimates at each site",
    columns: columns(),
    sort: 2,
    descending: true,
  });
  const draw = (): void => {
    domain = domainOf(effects, feature, all);
    decimals = effects.decimals(feature);
    groups.replaceChildren(groupForest(effects, feature, domain));
    pager.change({ columns: columns() });
  };
  select.addEventListener("change", () => {
    feature = Number(select.value);
    draw();
  });
  onTheme(draw);
  effects.listen(draw);
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

function ends(effects: Effects, site: number, feature: number, decimals: number): string {
  const { low, high } = effects.at(site, feature);
  return low === null || high === null ? "–" : `${fixed(low, decimals)} to ${fixed(high, decimals)}`;
}

/** The population and each group: mean of the sites' estimates, and from the least to the largest. */
function groupForest(effects: Effects, feature: number, domain: Domain): HTMLElement {
  const { model } = effects;
  const decimals = effects.decimals(feature);
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
    hint: "± one sd",
    value: effects.show(average, feature),
    low: effects.show(average - wide, feature),
    high: effects.show(average + wide, feature),
    tint: null,
  });
  if (model.payload.resolved) {
    model.members.slice(0, MOST_GROUPS).forEach((members, group) => {
      const values = members.map((site) => model.estimate(site, feature));
      const value = values.reduce((sum, one) => sum + one, 0) / values.length;
      lines.push({
        name: model.groupName(group),
        hint: plural(members.length, "site"),
        value: effects.show(value, feature),
        low: effects.show(Math.min(...values), feature),
        high: effects.show(Math.max(...values), feature),
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
  const label = `${effects.title(feature)}: ${lines.map((one) => `${one.name} ${fixed(one.value, decimals)}`).join(", ")}`;
  const chart = picture(width, bottom + 44, label);
  chart.append(bottomAxis(x, 4, bottom, effects.title(feature), narrow ? 3 : 6));
  chart.append(svg("line", { x1: x(effects.none), x2: x(effects.none), y1: 4, y2: bottom, class: "zero" }));
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
        : svg("path", { d: groupShape(k - 1, 6), transform: `translate(${x(one.value)} ${y})`, fill: tint }),
      svg("text", { x: width, y: y + 4, "text-anchor": "end", class: "value" }, fixed(one.value, decimals)),
    );
  });
  const more = model.members.length - MOST_GROUPS;
  const rest = model.payload.resolved && more > 0 ? ` ${plural(more, "smaller group")} not drawn.` : "";
  const caption = model.payload.resolved
    ? `A group’s mark is the mean of its sites’ estimates; its line runs from the smallest to the largest. The line of all sites is one standard deviation between sites either way.${rest}`
    : "The diamond is the population mean; its line is one standard deviation between sites either way.";
  return el(
    "figure",
    {},
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Groups" }, withDownload(chart, "groups")),
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

function oneSite(model: Model, state: State, effects: Effects): HTMLElement {
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
    body.replaceChildren(siteForest(effects, chosen[0], chosen[1]));
  };
  inputs.forEach((input, k) => {
    input.addEventListener("change", () => {
      const words = input.value.trim();
      const site = byName.get(words.toLowerCase());
      if (site === undefined && words) {
        body.replaceChildren(el("p", { class: "hint" }, `No site is called “${words}”.`));
        return;
      }
      chosen[k] = site ?? (k === 1 ? null : chosen[k]);
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
  effects.listen(draw);
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

function siteForest(effects: Effects, first: number | null, second: number | null): HTMLElement {
  const { model } = effects;
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
    second === null ? null : el("th", { scope: "col", class: "number" }, effects.ratio ? "Ratio" : "Difference"),
    ...(second === null ? [first] : [first, second]).map((site) =>
      el("th", { scope: "col", class: "number" }, model.names[site]),
    ),
    el("th", { scope: "col" }, "Picture"),
  );
  const sites = second === null ? [first] : [first, second];
  const lines = shown.map((k) => {
    const decimals = effects.decimals(k);
    const cells = [el("th", { scope: "row" }, effects.title(k))];
    if (second !== null) {
      const half = model.halfOfDifference(first, second, k);
      const value = difference(k);
      const apart = half !== null && Math.abs(value) > half;
      const range = `${fixed(effects.show(value - (half ?? 0), k), decimals)} to ${fixed(effects.show(value + (half ?? 0), k), decimals)}`;
      cells.push(
        el(
          "td",
          { class: `number ${apart ? "apart" : ""}` },
          fixed(effects.show(value, k), decimals),
          small(half === null ? "" : range),
        ),
      );
    }
    for (const site of sites) {
      const words = ends(effects, site, k, decimals);
      cells.push(el("td", { class: "number" }, fixed(effects.at(site, k).value, decimals), small(words)));
    }
    cells.push(el("td", {}, intervals(effects, sites, k, domainOf(effects, k, sites, 0.05))));
    return el("tr", {}, ...cells);
  });
  const rest = all.length > shown.length ? ` The first ${shown.length} of ${all.length} are shown.` : "";
  const level = Math.round(100 * model.payload.coefficients.level);
  const how = model.knowsDifferences
    ? "The interval of the difference counts what the two sites share only once, so it can be narrower than their own intervals suggest."
    : "Approximate: with this many sites the page treats sites as independent, and the interval is too wide for similar sites. fedkin inspect MODEL --contrast A B gives the exact interval.";
  const words =
    second === null
      ? ""
      : model.halves
        ? `Sorted by the evidence for a difference; bold where its ${level}% interval excludes no difference. ${how}${rest}`
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
