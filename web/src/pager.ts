// A table of sites that is searched, sorted and paged: as useful with five sites as with five thousand.
import type { Model } from "./data";
import { el, fresh, plural, save, whole } from "./dom";
import type { State } from "./state";
import { groupMark, onTheme } from "./theme";

export interface Column {
  title: string;
  text: (site: number) => string;
  key: (site: number) => string | number;
  number?: boolean;
  site?: boolean;
  group?: boolean;
  tone?: (site: number) => string;
  /** What the CSV file has in place of the text. */
  csv?: (site: number) => string | number;
  draw?: (site: number) => Element;
}

interface Options {
  caption: string;
  columns: Column[];
  sort: number;
  descending?: boolean;
  size?: number;
}

const collator = new Intl.Collator("en", { numeric: true });

export class Pager {
  readonly element: HTMLElement;
  private readonly body = el("tbody");
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
    this.sort = options.sort;
    this.descending = options.descending ?? false;
    const id = fresh("search");
    this.search = el("input", {
      id,
      type: "search",
      autocomplete: "off",
      placeholder: "site or group",
      input: () => this.refresh(true),
    });
    this.back = el("button", { type: "button", click: () => this.turn(-1) }, "Previous");
    this.next = el("button", { type: "button", click: () => this.turn(1) }, "Next");
    const head = el("tr");
    options.columns.forEach((column, k) => {
      const press = el("button", { type: "button", class: "sort", click: () => this.by(k) }, column.title);
      const cell = el("th", { scope: "col", class: column.number ? "number" : null }, press);
      this.heads.push(cell);
      head.append(cell);
    });
    const table = el("table", {}, el("caption", { class: "quiet" }, options.caption), el("thead", {}, head), this.body);
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
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": options.caption }, table),
    );
    state.listen(() => this.mark());
    onTheme(() => this.draw());
    this.refresh(true);
  }

  /** Show other columns, with the same search. */
  change(options: Partial<Options>): void {
    this.options = { ...this.options, ...options };
    this.options.columns.forEach((column, k) => {
      const press = this.heads[k]?.querySelector("button");
      if (press) press.textContent = column.title;
    });
    this.refresh(false);
  }

  private by(column: number): void {
    this.descending = this.sort === column ? !this.descending : Boolean(this.options.columns[column].number);
    this.sort = column;
    this.refresh(true);
  }

  private turn(step: number): void {
    this.page += step;
    this.draw();
  }

  private refresh(first: boolean): void {
    const words = this.search.value.trim().toLowerCase();
    const { columns } = this.options;
    const all = this.model.names.map((_, site) => site);
    this.found = words
      ? all.filter(
          (site) =>
            this.model.names[site].toLowerCase().includes(words) ||
            this.model.groupName(this.model.groups[site]).toLowerCase() === words,
        )
      : all;
    const key = columns[this.sort].key;
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
    const size = this.options.size ?? 12;
    const pages = Math.max(Math.ceil(this.found.length / size), 1);
    this.page = Math.min(Math.max(this.page, 0), pages - 1);
    const shown = this.found.slice(this.page * size, (this.page + 1) * size);
    const none = `No site or group is called “${this.search.value.trim()}”.`;
    const empty = el("tr", {}, el("td", { class: "hint", colspan: this.options.columns.length }, none));
    this.body.replaceChildren(...(shown.length ? shown.map((site) => this.line(site)) : [empty]));
    const total = plural(this.found.length, "site");
    const from = this.page * size;
    this.count.textContent = pages > 1 ? `${whole(from + 1)}–${whole(from + shown.length)} of ${total}` : total;
    this.back.disabled = this.page === 0;
    this.next.disabled = this.page === pages - 1;
    this.back.hidden = this.next.hidden = pages === 1;
    this.mark();
  }

  /** Save all sites that were found, in the order shown. */
  private download(): void {
    const columns = this.options.columns.filter((column) => !column.draw);
    const cell = (value: string | number): string =>
      /[",\n]/.test(`${value}`) ? `"${`${value}`.replaceAll('"', '""')}"` : `${value}`;
    const value = (column: Column, site: number): string => cell((column.csv ?? column.text)(site));
    const lines = this.found.map((site) => columns.map((column) => value(column, site)).join(","));
    const text = [columns.map((column) => cell(column.title)).join(","), ...lines].join("\n");
    save(`${this.options.caption.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-")}.csv`, `${text}\n`, "text/csv");
  }

  private line(site: number): HTMLTableRowElement {
    const row = el("tr", {
      "data-site": site,
      mouseenter: () => this.state.hover(site),
      mouseleave: () => this.state.hover(null),
    });
    for (const column of this.options.columns) {
      const text = column.text(site);
      if (column.site) {
        const press = el("button", { type: "button", class: "site", click: () => this.state.choose(site) }, text);
        row.append(el("th", { scope: "row" }, press));
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
