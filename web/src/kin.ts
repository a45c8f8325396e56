// Who is kin: graph or map beside the matrix, and a card about the chosen site.
import { gainOverLocal } from "./compare";
import type { Model } from "./data";
import { el, fmt, fresh, plural, section } from "./dom";
import { Graph } from "./graph";
import { Matrix } from "./matrix";
import type { State } from "./state";
import { groupColour, onTheme } from "./theme";

const MOST_OFFERED = 1000;

export function kinSection(model: Model, state: State): HTMLElement {
  const kin = model.payload.method === "kin";
  const about = model.payload.resolved
    ? kin
      ? "Colours are groups. The matrix has the probability of every pair to be kin; the graph joins pairs that are kin rather than not."
      : "Colours are groups. The matrix has the share of coefficients that two sites have in common; the graph has the edges that were used."
    : "There are no groups to colour by: colours say how far a site’s coefficients are from the mean of all sites. The matrix still shows who leans towards whom.";
  return section(
    "kin",
    "Who is kin",
    about,
    model.payload.resolved ? null : unresolved(model),
    legend(model, state),
    el("div", { class: "columns" }, new Graph(model, state).element, new Matrix(model, state).element),
    siteCard(model, state),
  );
}

function unresolved(model: Model): HTMLElement {
  const words =
    model.payload.method === "kin"
      ? "The data do not single out groups. That is a result, not a failure: sites differ by degrees, and every site’s estimates already average over all ways to group them."
      : model.n === 1
        ? "There is one site."
        : "Sites were not divided into several groups at this penalty level.";
  return el("div", { class: "calm" }, el("p", { class: "big" }, "No groups resolved"), el("p", {}, words));
}

function legend(model: Model, state: State): HTMLElement | null {
  if (!model.payload.resolved) return null;
  const most = 12;
  const list = el("ul", { class: "legend-groups", "aria-label": "Groups" });
  const draw = (): void => {
    const items = model.members.slice(0, most).map((members, group) => {
      const swatch = el("span", { class: "swatch", "aria-hidden": true });
      swatch.style.background = groupColour(group);
      const some = members
        .slice(0, 4)
        .map((site) => model.names[site])
        .join(", ");
      const more = members.length > 4 ? ` and ${members.length - 4} more` : "";
      const press = el(
        "button",
        { type: "button", class: "group", title: some + more, click: () => state.choose(members[0]) },
        swatch,
        el("strong", {}, model.groupName(group)),
        ` ${plural(members.length, "site")}`,
      );
      return el("li", {}, press);
    });
    const rest = model.members.length - most;
    if (rest > 0) items.push(el("li", { class: "rest" }, `and ${plural(rest, "smaller group")}`));
    list.replaceChildren(...items);
  };
  draw();
  onTheme(draw);
  return list;
}

function siteCard(model: Model, state: State): HTMLElement {
  const id = fresh("site");
  const list = fresh("sites");
  const input = el("input", {
    id,
    type: "search",
    list: model.n <= MOST_OFFERED ? list : null,
    autocomplete: "off",
    placeholder: "name of a site",
  });
  const byName = new Map(model.names.map((name, site) => [name.toLowerCase(), site]));
  const find = (): void => {
    const words = input.value.trim().toLowerCase();
    if (!words) return;
    const site = byName.get(words) ?? model.names.findIndex((name) => name.toLowerCase().startsWith(words));
    if (site !== undefined && site >= 0 && site !== state.now.chosen) state.choose(site);
  };
  input.addEventListener("change", find);
  const offered =
    model.n <= MOST_OFFERED
      ? el("datalist", { id: list }, ...model.names.map((name) => el("option", { value: name })))
      : null;
  const body = el("div", { class: "card-body", "aria-live": "polite" });
  const draw = (): void => {
    const site = state.now.chosen;
    body.replaceChildren(
      ...(site === null
        ? [el("p", { class: "hint" }, "Choose a site here, in the pictures or in a table to see its kin.")]
        : card(model, site, state)),
    );
  };
  state.listen(draw);
  draw();
  return el(
    "div",
    { class: "card" },
    el("div", { class: "bar" }, el("label", { for: id }, "Site"), input, offered),
    body,
  );
}

function card(model: Model, site: number, state: State): Node[] {
  const group = model.groups[site];
  const found = model.payload.comparison;
  const gain = found ? (gainOverLocal(found)?.[site] ?? null) : null;
  const swatch = el("span", { class: "swatch", "aria-hidden": true });
  swatch.style.background = groupColour(group, model.payload.resolved);
  const facts = [plural(model.payload.sites.rows[site], "row")];
  if (model.payload.resolved) {
    const others = model.members[group].length - 1;
    facts.push(
      others ? `${model.groupName(group)} with ${plural(others, "other")}` : `${model.groupName(group)}, alone`,
    );
  }
  if (gain !== null && found) {
    const better = gain >= 0 ? "better" : "worse";
    facts.push(`${found.metric} ${fmt(Math.abs(gain))} ${better} than alone`);
  }
  const notes = model.payload.sites.notes[String(site)] ?? [];
  const near = model.nearest(site, 8).filter((one) => one.share > 0.005);
  const known = model.payload.matrix.kind === "pairs" || model.payload.nearest !== null;
  const what = model.payload.method === "kin" ? "Most likely kin" : "Most in common";
  const list = el("ol", { class: "near" });
  for (const one of near) {
    const bar = el("span", { class: "bar-fill", "aria-hidden": true });
    bar.style.width = `${Math.round(100 * one.share)}%`;
    const press = el(
      "button",
      { type: "button", class: "site", click: () => state.choose(one.site) },
      model.names[one.site],
    );
    press.addEventListener("mouseenter", () => state.hover(one.site));
    press.addEventListener("mouseleave", () => state.hover(null));
    list.append(
      el("li", {}, press, el("span", { class: "track" }, bar), el("span", { class: "share" }, fmt(one.share, 2))),
    );
  }
  return [
    el("h3", {}, swatch, model.names[site]),
    el("p", {}, `${facts.join("; ")}.`),
    ...notes.map((words) => el("p", { class: "note" }, words)),
    near.length
      ? el("h4", {}, what)
      : el(
          "p",
          { class: "hint" },
          known ? "No site is likely to be its kin." : "There are too many sites to list its kin here.",
        ),
    list,
  ];
}
