// A table of sites with search, sorting and pages.

import { fitting, narrow } from "./chart";
import type { Model } from "./data";
import { el, fresh, plural, saveCsv, scroll, whole } from "./dom";
import type { State } from "./state";
import { groupMark, onLook, onPaper } from "./theme";

export interface Column {
  title: string;
  text: (site: number) => string;
  key: (site: number) => string | number;
  number?: boolean;
  site?: boolean;
  group?: boolean;
  tone?: (site: number) => string;
  /** The value in the CSV file instead of the text. */
  csv?: (site: number) => string | number;
  draw?: (site: number) => Element;
  /** Show the column only on the page, or only in the CSV file. */
  only?: "page" | "csv";
}

/** The first columns of every table: the site, and its group or district. */
export function siteColumns(model: Model): Column[] {
  const { resolved, sites } = model.payload;
  const { districts } = sites;
  const only = narrow() ? "csv" : undefined;
  const columns: Column[] = [
    { title: "Site", text: (one) => model.names[one], key: (one) => model.names[one], site: true },
  ];
  const group = (site: number): string => model.groupName(model.groups[site]);
  if (resolved) columns.push({ title: "Group", text: group, key: (one) => model.groups[one], group: true, only });
  if (districts) columns.push({ title: "District", text: (one) => districts[one], key: (one) => districts[one], only });
  return columns;
}

interface Options {
  caption: string;
  columns: Column[];
  /** Title of the column to sort by. */
  sort: string;
  descending?: boolean;
}

/** A table of this many sites has no pages, on the screen and on paper. */
const MOST_LINES = 15;
const MOST_PRINTED = 150;

const collator = new Intl.Collator("en", { numeric: true });

export class Pager {
  readonly element: HTMLElement;
  private readonly body = el("tbody");
  private readonly caption = el("caption", { class: "quiet" });
  private readonly count = el("span", { class: "count", "aria-live": "polite" });
  private readonly search: HTMLInputElement;
  private readonly heads: HTMLTableCellElement[] = [];
  private readonly back: HTMLButtonElement;
  private readonly next: HTMLButtonElement;
  private sort: number;
  private descending: boolean;
  private page = 0;
  private found: number[] = [];

  constructor(
    private readonly model: Model,
    private readonly state: State,
    private options: Options,
  ) {
    this.sort = this.columns.findIndex((column) => column.title === options.sort);
    this.descending = options.descending ?? false;
    const id = fresh("search");
    this.search = el("input", {
      id,
      type: "search",
      autocomplete: "off",
      placeholder: model.payload.resolved ? "site or group" : "site",
      input: () => this.refresh(true),
    });
    this.back = el("button", { type: "button", click: () => this.turn(-1) }, "Previous");
    this.next = el("button", { type: "button", click: () => this.turn(1) }, "Next");
    const head = el("tr");
    this.columns.forEach((column, k) => {
      const press = el("button", { type: "button", class: "sort", click: () => this.by(k) }, column.title);
      const cell = el("th", { scope: "col", class: column.number ? "number" : null }, press);
      this.heads.push(cell);
      head.append(cell);
    });
    const table = el("table", {}, this.caption, el("thead", {}, head), this.body);
    this.caption.textContent = options.caption;
    this.element = el(
      "div",
      { class: "pager" },
      el(
        "div",
        { class: "bar" },
        el("label", { for: id }, "Find"),
        this.search,
        this.count,
        el(
          "span",
          { class: "turn" },
          this.back,
          this.next,
          el("button", { type: "button", click: () => this.download() }, "CSV"),
        ),
      ),
      scroll(options.caption, table),
    );
    state.listen(() => this.mark());
    onLook(() => this.draw());
    this.refresh(true);
  }

  private get columns(): Column[] {
    return this.options.columns.filter((column) => column.only !== "csv");
  }

  /** Show other columns with the same titles, and keep the search. */
  change(options: Partial<Options>): void {
    this.options = { ...this.options, ...options };
    this.caption.textContent = this.options.caption;
    this.refresh(false);
  }

  private by(column: number): void {
    this.descending = this.sort === column ? !this.descending : Boolean(this.columns[column].number);
    this.sort = column;
    this.refresh(true);
  }

  private turn(step: number): void {
    this.page += step;
    this.draw();
  }

  private refresh(first: boolean): void {
    const words = this.search.value.trim().toLowerCase();
    const all = this.model.names.map((_, site) => site);
    this.found = words
      ? all.filter(
          (site) =>
            this.model.names[site].toLowerCase().includes(words) ||
            this.model.groupName(this.model.groups[site]).toLowerCase() === words,
        )
      : all;
    const { key } = this.columns[this.sort];
    const sign = this.descending ? -1 : 1;
    this.found.sort((a, b) => {
      const x = key(a);
      const y = key(b);
      if (typeof x === "string" || typeof y === "string") return sign * collator.compare(String(x), String(y));
      if (Number.isNaN(x) || Number.isNaN(y)) return Number(Number.isNaN(x)) - Number(Number.isNaN(y));
      return sign * (x - y);
    });
    this.heads.forEach((cell, k) => {
      cell.setAttribute("aria-sort", k !== this.sort ? "none" : this.descending ? "descending" : "ascending");
    });
    if (first) this.page = 0;
    this.draw();
  }

  private draw(): void {
    const size = this.found.length <= (onPaper() ? MOST_PRINTED : MOST_LINES) ? MOST_PRINTED : 12;
    const pages = Math.max(Math.ceil(this.found.length / size), 1);
    this.page = Math.min(Math.max(this.page, 0), pages - 1);
    const shown = this.found.slice(this.page * size, (this.page + 1) * size);
    const none = `No ${this.search.placeholder} is called “${this.search.value.trim()}”.`;
    const empty = el("tr", {}, el("td", { class: "hint", colspan: this.columns.length }, none));
    this.body.replaceChildren(...(shown.length ? shown.map((site) => this.line(site)) : [empty]));
    const total = plural(this.found.length, "site");
    const from = this.page * size;
    this.count.textContent = pages > 1 ? `${whole(from + 1)}–${whole(from + shown.length)} of ${total}` : total;
    this.back.disabled = this.page === 0;
    this.next.disabled = this.page === pages - 1;
    this.back.hidden = this.next.hidden = pages === 1;
    this.mark();
  }

  /** Save all matching sites, in the order shown. */
  private download(): void {
    const columns = this.options.columns.filter((column) => column.only !== "page");
    const lines = this.found.map((site) => columns.map((column) => (column.csv ?? column.text)(site)));
    saveCsv(this.options.caption, [columns.map((column) => column.title), ...lines]);
  }

  private line(site: number): HTMLTableRowElement {
    const row = el("tr", {
      "data-site": site,
      mouseenter: () => this.state.hover(site),
      mouseleave: () => this.state.hover(null),
    });
    for (const column of this.columns) {
      const text = column.text(site);
      if (column.site) {
        const shown = fitting(text);
        const click = (): void => this.state.choose(site);
        const press = el(
          "button",
          { type: "button", class: "site", title: shown === text ? null : text, click },
          shown,
        );
        const mark = narrow() && this.model.payload.resolved ? groupMark(this.model.groups[site]) : null;
        row.append(el("th", { scope: "row" }, mark, press));
      } else if (column.group) {
        row.append(el("td", {}, groupMark(this.model.groups[site], this.model.payload.resolved), text));
      } else {
        const tone = column.tone?.(site) ?? "";
        const cell = el("td", { class: `${column.number ? "number" : ""} ${tone}`.trim() || null });
        cell.append(column.draw ? column.draw(site) : text);
        row.append(cell);
      }
    }
    return row;
  }

  private mark(): void {
    const { hovered, chosen } = this.state.now;
    for (const row of this.body.rows) {
      const site = Number(row.dataset.site);
      row.classList.toggle("hovered", site === hovered);
      row.classList.toggle("chosen", site === chosen);
      row.querySelector("button.site")?.setAttribute("aria-pressed", String(site === chosen));
    }
  }
}
