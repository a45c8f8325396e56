// Coefficients as forest plots: one feature over groups and sites, or all features of one or two sites.
import { bottomAxis, fitting, narrow, picture, room, type Scale, valueOn, withDownload } from "./chart";
import type { Model } from "./data";
import { csvButton, decimalsFor, el, fixed, fresh, plural, scroll, section, svg, table, whole } from "./dom";
import { siteDots, twoEnds } from "./dots";
import { type Effect, Effects, interval } from "./effects";
import { type Column, Pager, siteColumns } from "./pager";
import { siteInput } from "./sites";
import type { State } from "./state";
import { groupColour, groupShape, onLook } from "./theme";

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
  const against = classes?.length === 2 ? ` = ${classes[1]}` : classes ? `, each class against ${classes[0]}` : "";
  const what = target === null ? "" : `Effects on ${target}${against}. `;
  const note = left_out
    ? ` ${plural(left_out, "coefficient")} with small differences between sites are not on this page.`
    : "";
  return section(
    "coefficients",
    "Effects at each site",
    `${what}${intervals}${note}`,
    effects.controls(),
    oneFeature(model, state, effects),
    populationTable(effects),
    oneSite(model, state, effects),
  );
}

/** The population means with intervals, and standard deviations between sites; null without intervals. */
function populationTable(effects: Effects): HTMLElement | null {
  const { names, mean, population, level } = effects.model.payload.coefficients;
  if (!population || effects.model.n === 1) return null;
  const body = el("tbody");
  const draw = (): void => {
    const lines = names.map((_, k) => {
      const [value, low, high] = [mean[k], population.low[k], population.high[k]].map((one) =>
        one === null ? null : effects.show(one, k),
      );
      const half = low === null || high === null ? 0 : (high - low) / 4;
      const decimals = decimalsFor([half], [value]);
      const between = (population.sd[k] ?? Number.NaN) * effects.factor(k);
      const cells = [
        fixed(value, decimals),
        interval({ value: 0, low, high }, decimals),
        fixed(between, decimalsFor([], [between])),
      ];
      return el(
        "tr",
        {},
        el("th", { scope: "row" }, fitting(effects.title(k))),
        ...cells.map((words) => el("td", { class: "number" }, words)),
      );
    });
    body.replaceChildren(...lines);
  };
  draw();
  effects.listen(draw);
  const heads = ["Coefficient", "Mean", `${Math.round(100 * level)}% interval`, "sd between sites"];
  const shown = table("Effects in the population of sites", heads, body);
  return el(
    "details",
    { class: "more", open: names.length <= 12 },
    el("summary", {}, "Effects in the population of sites"),
    scroll("Population effects", shown),
    el(
      "div",
      { class: "below" },
      el(
        "p",
        { class: "hint" },
        "The interval is of the mean over sites. Standard deviations are on the additive scale.",
      ),
      csvButton("population effects", shown),
    ),
  );
}

/** The measure by which payload.py chooses the first coefficient, in words. */
const measure = (model: Model): string =>
  `the largest standard deviation between ${model.payload.resolved ? "groups" : "sites"} relative to ${
    model.halves ? "the average width of a site’s interval" : "its mean"
  }`;

const PICTURE: [number, number] = [6, 254];

/** Intervals of one or two sites as a small picture: lines, marks, and the value of no effect. */
function intervals(effects: Effects, sites: number[], feature: number, x: Scale): SVGSVGElement {
  const { groups, payload } = effects.model;
  const [width, height] = [260, sites.length > 1 ? 26 : 18];
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
    const stroke = groupColour(groups[site], payload.resolved);
    if (low !== null && high !== null) {
      const line = { x1: x(low), x2: x(high), y1: y, y2: y, stroke };
      drawn.append(svg("line", { ...line, "stroke-width": 2, "stroke-linecap": "round" }));
    }
    const place = { d: groupShape(groups[site], 4, payload.resolved), transform: `translate(${x(value)} ${y})` };
    drawn.append(svg("path", { ...place, fill: k ? "var(--paper)" : stroke, stroke, "stroke-width": k ? 2 : 0 }));
  });
  return drawn;
}

/** The effects of all sites in order, with intervals and the average: the picture without groups. */
function rankedStrip(state: State, effects: Effects, feature: number): HTMLElement {
  const { model } = effects;
  const all = model.names
    .map((_, site) => site)
    .sort((a, b) => model.estimate(b, feature) - model.estimate(a, feature));
  const { some: sites, left, words: some } = twoEnds(all);
  const chart = siteDots(
    model,
    state,
    sites.map((site) => ({ site, ...effects.at(site, feature) })),
    {
      label: `${effects.title(feature)} at ${plural(sites.length, "site")}, in order`,
      title: effects.axis(feature),
      decimals: effects.decimals(feature),
      line: { at: effects.show(model.payload.coefficients.mean[feature] ?? 0, feature), class: "average" },
      log: effects.ratio,
      left,
    },
  );
  const lines = model.halves ? " Lines are intervals." : "";
  const words = `Sites in order of their estimates. The dashed line is the ${model.payload.coefficients.population ? "population mean" : "average of all sites"}.${lines}${some}`;
  return el("figure", { class: "ranked" }, withDownload(chart, "sites"), el("figcaption", {}, words));
}

function oneFeature(model: Model, state: State, effects: Effects): HTMLElement {
  const id = fresh("feature");
  const all = model.names.map((_, site) => site);
  const { names } = model.payload.coefficients;
  let feature = model.payload.coefficients.first;
  const offers = names.map((name, k) => el("option", { value: k, selected: k === feature }, name));
  const select = el("select", { id }, ...offers);
  const pictures = el("div", { class: "forest" });
  const table = (): { caption: string; columns: Column[] } => {
    const decimals = effects.decimals(feature);
    const x = effects.scale(
      all.map((site) => effects.at(site, feature)),
      PICTURE,
    );
    const rows = (site: number): number => model.payload.sites.rows[site];
    const end = (title: string, value: (one: Effect) => number | null): Column => {
      const at = (site: number): number => value(effects.at(site, feature)) ?? Number.NaN;
      return { title, text: (site) => String(at(site)), csv: at, key: at, only: "csv" };
    };
    const columns: Column[] = [
      ...siteColumns(model),
      {
        title: "Estimate",
        text: (site) => fixed(effects.at(site, feature).value, decimals),
        csv: (site) => effects.at(site, feature).value,
        key: (site) => model.estimate(site, feature),
        number: true,
      },
      model.halves
        ? {
            title: "Interval",
            text: (site) => interval(effects.at(site, feature), decimals),
            key: (site) => model.half(site, feature) ?? 0,
            number: true,
            only: "page",
          }
        : { title: "Rows", text: (site) => whole(rows(site)), csv: rows, key: rows, number: true },
      ...(model.halves ? [end("Low", (one) => one.low), end("High", (one) => one.high)] : []),
      {
        title: "Picture",
        text: () => "",
        key: (site) => model.estimate(site, feature),
        draw: (site) => intervals(effects, [site], feature, x),
        only: "page",
      },
    ];
    return { caption: `${effects.axis(feature)} at each site`, columns };
  };
  const pager = new Pager(model, state, { sort: "Estimate", descending: true, ...table() });
  const draw = (): void => {
    feature = Number(select.value);
    const picture = model.payload.resolved || model.n === 1 ? groupForest : rankedStrip;
    pictures.replaceChildren(picture(state, effects, feature));
    pager.change(table());
  };
  select.addEventListener("change", draw);
  onLook(draw);
  effects.listen(draw);
  draw();
  const hint =
    model.p > 1 && model.n > 1 ? el("span", { class: "hint" }, `The first one shown has ${measure(model)}.`) : null;
  return el(
    "div",
    { class: "block" },
    el("div", { class: "bar" }, el("label", { for: id }, "Coefficient"), select, hint),
    pictures,
    el(
      "details",
      { class: "more", open: model.payload.resolved && model.n <= 60 },
      el("summary", {}, `All ${plural(model.n, "site")}`),
      pager.element,
    ),
  );
}

/** The population and each group: mean and range of the sites' estimates. */
function groupForest(_: State, effects: Effects, feature: number): HTMLElement {
  const { model } = effects;
  const decimals = effects.decimals(feature);
  const { mean, sd, population, level } = model.payload.coefficients;
  const average = mean[feature] ?? 0;
  const wide = sd[feature] ?? 0;
  const percent = `${Math.round(100 * level)}%`;
  interface Line extends Effect {
    name: string;
    hint: string;
  }
  const line = (name: string, hint: string, ...all: number[]): Line => {
    const [value, low, high] = all.map((one) => effects.show(one, feature));
    return { name, hint, value, low, high };
  };
  const lines = [
    line(
      "All sites",
      population ? `${percent} interval` : "± one sd",
      average,
      population?.low[feature] ?? average - wide,
      population?.high[feature] ?? average + wide,
    ),
  ];
  if (model.payload.resolved) {
    model.members.slice(0, MOST_GROUPS).forEach((members, group) => {
      const values = members.map((site) => model.estimate(site, feature));
      const value = values.reduce((sum, one) => sum + one, 0) / values.length;
      const size = plural(members.length, "site");
      lines.push(line(model.groupName(group), size, value, Math.min(...values), Math.max(...values)));
    });
  }
  const width = room();
  const row = 34;
  const left = narrow() ? 84 : 190;
  const bottom = 10 + row * lines.length;
  const x = effects.scale(lines, [left, width - (narrow() ? 62 : 90)]);
  const label = `${effects.title(feature)}: ${lines.map((one) => `${one.name} ${fixed(one.value, decimals)}`).join(", ")}`;
  const chart = picture(width, bottom + 44, label);
  chart.append(bottomAxis(x, 4, bottom, effects.axis(feature), narrow() ? 3 : 6));
  chart.append(svg("line", { x1: x(effects.none), x2: x(effects.none), y1: 4, y2: bottom, class: "zero" }));
  lines.forEach((one, k) => {
    const y = 10 + row * (k + 0.5);
    const fill = k ? groupColour(k - 1) : "currentColor";
    const mark = k ? groupShape(k - 1, 6) : "M0 -7l7 7l-7 7l-7 -7z";
    const [from, to] = [x(one.low ?? one.value), x(one.high ?? one.value)];
    chart.append(
      svg("text", { x: 0, y: y + 4, class: "name" }, one.name),
      svg("text", { x: left - 14, y: y + 4, "text-anchor": "end", class: "hint" }, narrow() ? "" : one.hint),
      svg("line", {
        x1: from,
        x2: to,
        y1: y,
        y2: y,
        stroke: fill,
        "stroke-width": 3,
        "stroke-linecap": "round",
        opacity: 0.55,
      }),
      svg("path", { d: mark, transform: `translate(${x(one.value)} ${y})`, fill }),
      svg("text", { x: width, y: y + 4, "text-anchor": "end", class: "value" }, valueOn(x, one.value, decimals)),
    );
  });
  const more = model.members.length - MOST_GROUPS;
  const rest = model.payload.resolved && more > 0 ? ` ${plural(more, "smaller group")} not drawn.` : "";
  const around = population ? `its ${percent} interval` : "one standard deviation between sites either way";
  const groups = `A group’s mark is the mean of its sites’ estimates; its line runs from the smallest to the largest.${rest}`;
  const caption = `The diamond is the population mean; its line is ${around}.${model.payload.resolved ? ` ${groups}` : ""}`;
  return el("figure", {}, withDownload(chart, "groups"), el("figcaption", {}, caption));
}

// --- one site, or two ------------------------------------------------------------------------------------------

function oneSite(model: Model, state: State, effects: Effects): HTMLElement {
  const chosen: (number | null)[] = defaults(model);
  const body = el("div", { class: "forest" });
  const fields = chosen.slice(0, Math.min(model.n, 2)).map((_, k) => {
    const id = fresh("site");
    const input = siteInput(model, id, (site, words) => {
      if (site === null && words) {
        body.replaceChildren(el("p", { class: "hint" }, `No site is called “${words}”.`));
        return;
      }
      chosen[k] = site ?? (k === 1 ? null : chosen[k]);
      draw();
    });
    return { input, label: el("label", { for: id }, k ? "against" : "Site") };
  });
  const draw = (): void => {
    fields.forEach(({ input }, k) => {
      const site = chosen[k];
      if (site !== null) input.value = model.names[site];
    });
    body.replaceChildren(siteForest(effects, chosen[0] ?? 0, chosen[1]));
  };
  let last: number | null = null;
  state.listen(({ chosen: site }) => {
    if (site === null || site === last) return;
    last = site;
    if (chosen[1] === site) chosen[1] = chosen[0];
    chosen[0] = site;
    draw();
  });
  onLook(draw);
  effects.listen(draw);
  draw();
  return el(
    "div",
    { class: "block", id: "difference" },
    el("h3", {}, model.n > 1 ? "Two sites side by side" : "The site"),
    el("div", { class: "bar" }, ...fields.flatMap(({ label, input }) => [label, input])),
    body,
  );
}

function defaults(model: Model): (number | null)[] {
  if (model.n === 1) return [0, null];
  if (model.payload.resolved && model.members.length > 1) return [model.members[0][0], model.members[1][0]];
  const order = model.payload.order;
  return [order[0], order[order.length - 1]];
}

function siteForest(effects: Effects, first: number, second: number | null): HTMLElement {
  const { model } = effects;
  const all = model.payload.coefficients.names.map((_, k) => k);
  const sites = second === null ? [first] : [first, second];
  const difference = (k: number): number =>
    second === null ? 0 : model.estimate(first, k) - model.estimate(second, k);
  const half = (k: number): number | null => (second === null ? null : model.halfOfDifference(first, second, k));
  const sure = (k: number): number => Math.abs(difference(k)) / (half(k) ?? 1);
  if (second !== null) all.sort((a, b) => sure(b) - sure(a));
  const shown = all.slice(0, MOST_FEATURES);
  const lines = shown.map((k) => {
    const decimals = effects.decimals(k);
    const cell = (one: Effect, apart = false): HTMLElement =>
      el(
        "td",
        { class: `number${apart ? " apart" : ""}` },
        fixed(one.value, decimals),
        one.low === null ? null : el("small", {}, interval(one, decimals)),
      );
    const apart = Math.abs(difference(k)) > (half(k) ?? Number.POSITIVE_INFINITY);
    const own = sites.map((site) => effects.at(site, k));
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, fitting(effects.title(k))),
      second === null ? null : cell(effects.around(difference(k), half(k), k), apart),
      ...own.map((one) => cell(one)),
      el("td", {}, intervals(effects, sites, k, effects.scale(own, PICTURE, 0.05))),
    );
  });
  const rest = all.length > shown.length ? ` The first ${shown.length} of ${all.length} are shown.` : "";
  const level = Math.round(100 * model.payload.coefficients.level);
  const how = model.knowsDifferences
    ? "The interval of the difference accounts for shared uncertainty, so it can be narrower than the intervals of the two sites suggest."
    : "Approximate: with this many sites the page treats sites as independent, and the interval is too wide for similar sites. fedkin inspect MODEL --contrast A B gives the exact interval.";
  const words =
    second === null
      ? ""
      : model.halves
        ? `Sorted by the evidence for a difference; bold where its ${level}% interval excludes no difference. ${how}${rest}`
        : `Sorted by the size of the difference.${rest}`;
  const names = sites.map((site) => fitting(model.names[site]));
  const heads = [
    "Coefficient",
    ...(second === null ? [] : [effects.ratio ? "Ratio" : "Difference"]),
    ...names,
    "Picture",
  ];
  const made = table(names.join(" against "), heads, el("tbody", {}, ...lines), 1, heads.length - 1);
  return el(
    "div",
    {},
    scroll("Coefficients of the chosen sites", made),
    el("div", { class: "below" }, el("p", { class: "hint" }, words), csvButton(names.join(" against "), made)),
  );
}
