// Which sites are alike: a graph or map and the matrix of pairs, and a card about the chosen site.
import type { Model } from "./data";
import { decimalsFor, el, fixed, fresh, plural, section, share } from "./dom";
import { Graph } from "./graph";
import { Matrix } from "./matrix";
import { siteInput } from "./sites";
import type { State } from "./state";
import { groupMark, onLook } from "./theme";

export function kinSection(model: Model, state: State): HTMLElement {
  const kin = model.payload.method === "kin";
  const { resolved, places, sites } = model.payload;
  if (sites.districts) {
    const words = `Sites are in ${plural(new Set(sites.districts).size, "district")}, and shrunk towards the means of their districts. Groups were not sought.`;
    return section("kin", "Sites and districts", words, siteCard(model, state));
  }
  const about = resolved
    ? kin
      ? "Colours and shapes are groups. The matrix shows the probability that each pair of sites is alike; the graph joins pairs that are probably alike."
      : "Colours and shapes are groups. The matrix shows the share of coefficients that are equal at two sites; the graph shows the edges that were used."
    : kin
      ? "The data do not separate the sites into groups: they differ gradually. Every site’s estimates average over all ways to group the sites."
      : model.n === 1
        ? "There is one site."
        : "At this penalty level the sites do not form several groups.";
  const graph = new Graph(model, state).element;
  const matrix = new Matrix(model, state).element;
  const pictures =
    resolved || places
      ? [el("div", { class: "columns" }, graph, matrix)]
      : [
          el(
            "details",
            { class: "more pairs" },
            el("summary", {}, "Every pair of sites"),
            el("div", { class: "columns" }, graph, matrix),
          ),
        ];
  return section("kin", "Which sites are alike", about, legend(model, state), ...pictures, siteCard(model, state));
}

function legend(model: Model, state: State): HTMLElement | null {
  if (!model.payload.resolved) return null;
  const most = 12;
  const list = el("ul", { class: "legend-groups", "aria-label": "Groups" });
  const draw = (): void => {
    const items = model.members.slice(0, most).map((members, group) => {
      const some = members
        .slice(0, 4)
        .map((site) => model.names[site])
        .join(", ");
      const more = members.length > 4 ? ` and ${members.length - 4} more` : "";
      const press = el(
        "button",
        {
          type: "button",
          class: "group",
          title: some + more,
          "aria-pressed": String(state.now.group === group),
          click: () => state.chooseGroup(group),
        },
        groupMark(group),
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
  onLook(draw);
  state.listen(({ hovered }) => {
    if (hovered === null) draw();
  });
  return list;
}

function siteCard(model: Model, state: State): HTMLElement {
  const id = fresh("site");
  const input = siteInput(model, id, (site, words) => {
    if (!words) return;
    if (site === null) body.replaceChildren(el("p", { class: "hint" }, `No site is called “${words}”.`));
    else if (site !== state.now.chosen) state.choose(site);
    else draw();
  });
  const body = el("div", { class: "card-body", "aria-live": "polite" });
  const draw = (): void => {
    const { chosen, group } = state.now;
    if (document.activeElement !== input || chosen !== null) input.value = chosen === null ? "" : model.names[chosen];
    if (chosen !== null) body.replaceChildren(...card(model, chosen, state));
    else if (group !== null) body.replaceChildren(...groupCard(model, group, state));
    else body.replaceChildren(el("p", { class: "hint" }, "Choose a site here, in a picture or in a table."));
  };
  let last = "";
  const changed = (): void => {
    const { chosen, group } = state.now;
    if (`${chosen} ${group}` !== last) draw();
    last = `${chosen} ${group}`;
  };
  state.listen(changed);
  draw();
  return el("div", { class: "card" }, el("div", { class: "bar" }, el("label", { for: id }, "Site"), input), body);
}

function groupCard(model: Model, group: number, state: State): Node[] {
  const members = model.members[group];
  const list = el("p", { class: "members" });
  for (const site of members.slice(0, 60)) {
    list.append(
      el("button", { type: "button", class: "site", click: () => state.choose(site) }, model.names[site]),
      " ",
    );
  }
  const rest =
    members.length > 60 ? el("p", { class: "hint" }, `and ${plural(members.length - 60, "more site")}`) : null;
  return [
    el("h3", {}, groupMark(group), model.groupName(group)),
    el("p", {}, `${plural(members.length, "site")}.`),
    list,
    ...(rest ? [rest] : []),
  ];
}

function card(model: Model, site: number, state: State): Node[] {
  const group = model.groups[site];
  const found = model.payload.comparison;
  const gain = found?.gains?.[site] ?? null;
  const facts = [plural(model.payload.sites.rows[site], "row")];
  if (model.payload.resolved) {
    const others = model.members[group].length - 1;
    facts.push(
      others ? `${model.groupName(group)} with ${plural(others, "other")}` : `${model.groupName(group)}, alone`,
    );
  }
  const { districts } = model.payload.sites;
  if (districts) {
    const others = districts.filter((one) => one === districts[site]).length - 1;
    facts.push(`${districts[site]} with ${plural(others, "other")}`);
  }
  if (gain !== null && found) {
    const error = found.gain_errors?.[site] ?? null;
    const decimals = decimalsFor([error], [gain]);
    const better = gain >= 0 ? "better" : "worse";
    const sure = error === null ? "" : ` (s.e. ${fixed(error, decimals)})`;
    facts.push(`${found.metric} ${fixed(Math.abs(gain), decimals)} ${better} than with its own model${sure}`);
  }
  const notes = model.payload.sites.notes[String(site)] ?? [];
  const near = model.nearest(site, 8).filter((one) => one.share > 0.005);
  const known = model.payload.matrix.kind === "pairs" || model.payload.nearest !== null;
  const what = model.payload.method === "kin" ? "Most probably alike" : "Most equal coefficients";
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
      el("li", {}, press, el("span", { class: "track" }, bar), el("span", { class: "share" }, share(one.share))),
    );
  }
  return [
    el("h3", {}, groupMark(group, model.payload.resolved), model.names[site]),
    el("p", {}, `${facts.join("; ")}.`),
    ...notes.map((words) => el("p", { class: "note" }, words)),
    near.length
      ? el("h4", {}, what)
      : el(
          "p",
          { class: "hint", hidden: districts !== null },
          known ? "No other site is probably similar." : "There are too many sites to list similar ones here.",
        ),
    list,
  ];
}
