// Fields that find a site by its name.
import type { Model } from "./data";
import { el } from "./dom";

const LIST = "site-names";
/** Up to this many sites a field offers all names. */
const MOST_OFFERED = 1000;

/** The names that fields offer; once on a page. */
export const siteNames = (model: Model): HTMLElement | null =>
  model.n > MOST_OFFERED
    ? null
    : el("datalist", { id: LIST }, ...model.names.map((name) => el("option", { value: name })));

/** A field for the name of a site, or its beginning; ``found`` hears of null where no site has that name. */
export function siteInput(model: Model, id: string, found: (site: number | null, words: string) => void) {
  const byName = new Map(model.names.map((name, site) => [name.toLowerCase(), site]));
  const input = el("input", {
    id,
    type: "search",
    list: model.n > MOST_OFFERED ? null : LIST,
    autocomplete: "off",
    placeholder: "name of a site",
  });
  input.addEventListener("change", () => {
    const words = input.value.trim().toLowerCase();
    const site = byName.get(words) ?? model.names.findIndex((name) => words && name.toLowerCase().startsWith(words));
    found(site < 0 ? null : site, input.value.trim());
  });
  return input;
}
