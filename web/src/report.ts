// The report of a model.
import { reproduceSection, trustSection } from "./closing";
import { coefficientsSection } from "./coefficients";
import { compareSection } from "./compare";
import { readModel } from "./data";
import { el, whole } from "./dom";
import { Graph } from "./graph";
import { kinSection } from "./kin";
import { pathSection } from "./path";
import { siteNames } from "./sites";
import { State } from "./state";
import { survivalSection } from "./survival";

export function startReport(main: HTMLElement, text: string): void {
  const model = readModel(text);
  const state = new State(model);
  const sections = [
    compareSection(model, state),
    kinSection(model, state),
    coefficientsSection(model, state),
    survivalSection(model, state),
    pathSection(model),
    trustSection(model),
    reproduceSection(model),
  ].filter((one): one is HTMLElement => one !== null);
  const links = sections.map((one) => el("a", { href: `#${one.id}` }, one.querySelector("h2")?.textContent));
  const { about, sites } = model.payload;
  const { districts } = sites;
  const facts: [string, string][] = [
    [whole(about.sites), about.sites === 1 ? "site" : "sites"],
    [whole(about.rows), "rows"],
    [whole(about.features), about.features === 1 ? "feature" : "features"],
    districts
      ? [whole(new Set(districts).size), "districts"]
      : [about.groups ? whole(about.groups) : "none", about.groups === 1 ? "group" : "groups"],
  ];
  const figures = el(
    "dl",
    { class: "figures" },
    ...facts.map(([value, name]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
  const masthead = document.querySelector(".masthead");
  masthead?.append(figures);
  if (model.n > 1 && (model.payload.resolved || model.payload.places))
    masthead?.append(new Graph(model, state, 400, true).element);
  const names = siteNames(model);
  main.replaceChildren(el("nav", { class: "contents", "aria-label": "Contents" }, ...links), ...sections);
  if (names) main.append(names);
  window.addEventListener("beforeprint", () => {
    for (const one of document.querySelectorAll("details")) one.open = true;
  });
  state.restore();
  document.body.dataset.ready = "yes";
}
