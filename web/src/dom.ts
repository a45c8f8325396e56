// Create elements without parsing HTML, so that names of sites stay text.

type Child = Node | string | number | null | undefined | false;
type Attributes = Record<string, string | number | boolean | EventListener | null | undefined>;

const SVG = "http://www.w3.org/2000/svg";

function fill<T extends Element>(element: T, attributes: Attributes, children: Child[]): T {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return fill(document.createElement(tag), attributes, children);
}

export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A number for people: three significant digits, a true minus, commas between thousands. */
export function fmt(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  let text: string;
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) text = value.toExponential(digits - 1);
  else if (size >= 10 ** digits) text = whole(Math.round(value));
  else text = value === 0 ? "0" : value.toPrecision(digits);
  return text.replaceAll("-", "−").replace("e+", "e");
}

/** Numbers that would need so many decimals are shown as powers of ten. */
const MOST_DECIMALS = 8;

/** Decimals that show a typical error with two digits, or a typical value with three if no error is known; negative
 * where the last digits before the point mean nothing. */
export function decimalsFor(errors: (number | null | undefined)[], values: (number | null | undefined)[] = []): number {
  const middle = (numbers: typeof errors): number | undefined => {
    const sizes = numbers.map((one) => Math.abs(one ?? 0)).filter((one) => one > 0 && Number.isFinite(one));
    return sizes.sort((a, b) => a - b)[sizes.length >> 1];
  };
  const error = middle(errors);
  const power = Math.floor(Math.log10(error ?? middle(values) ?? 1)) - (error ? 1 : 2);
  return Math.min(-power, MOST_DECIMALS);
}

/** A number with a fixed number of decimals and commas between thousands, so that columns line up; never −0. */
export function fixed(value: number | null | undefined, decimals: number): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (decimals >= MOST_DECIMALS && value !== 0) return fmt(value, 2);
  const digits = Math.max(decimals, 0);
  const text = value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return (/[1-9]/.test(text) ? text : text.replace("-", "")).replace("-", "−");
}

/** A probability or a share: never 0 or 1 by rounding. */
export const share = (value: number): string => (value > 0.995 ? ">0.99" : value < 0.005 ? "<0.01" : value.toFixed(2));

/** A number next to an axis, without trailing zeros. */
export function tick(value: number): string {
  const text = fmt(value);
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text.replace(/\.0*e/, "e");
}

export const whole = (value: number): string => value.toLocaleString("en-US");

export const plural = (count: number, word: string): string => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;

/** A name that is cut in its middle if it is long: names of sites often differ at their ends. */
export function short(name: string, most = 24): string {
  const end = Math.floor((most - 1) / 2);
  return name.length > most ? `${name.slice(0, most - 1 - end).trimEnd()}…${name.slice(-end).trimStart()}` : name;
}

/** Buttons of which one is pressed. */
export function choice<T>(label: string, offers: [string, T][], now: T, change: (value: T) => void): HTMLElement {
  const group = el("span", { class: "choice", role: "group", "aria-label": label });
  for (const [words, value] of offers) {
    const button = el("button", { type: "button", "aria-pressed": String(value === now) }, words);
    button.addEventListener("click", () => {
      for (const one of group.querySelectorAll("button")) one.setAttribute("aria-pressed", String(one === button));
      change(value);
    });
    group.append(button);
  }
  return group;
}

/** An element that scrolls sideways where the page is narrow. */
export const scroll = (label: string, ...children: Child[]): HTMLElement =>
  el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, ...children);

/** A table; columns from ``from`` to before ``to`` are numbers. */
export function table(caption: string, heads: string[], body: HTMLElement, from = 1, to = heads.length): HTMLElement {
  const cells = heads.map((title, k) => {
    return el("th", { scope: "col", class: k >= from && k < to ? "number" : null }, title);
  });
  return el("table", {}, el("caption", { class: "quiet" }, caption), el("thead", {}, el("tr", {}, ...cells)), body);
}

/** Save lines of cells as a CSV file. */
export function saveCsv(name: string, lines: (string | number)[][]): void {
  const cell = (value: string | number): string => {
    const text = typeof value === "number" ? `${Number(value.toPrecision(7))}` : value;
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const file = `${name.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-")}.csv`;
  save(file, `${lines.map((line) => line.map(cell).join(",")).join("\n")}\n`, "text/csv");
}

/** A button that saves a table, as it is shown, as a CSV file. */
export function csvButton(name: string, shown: HTMLElement): HTMLElement {
  const words = (cell: Element): string =>
    (cell.firstChild instanceof Text ? cell.firstChild.data : (cell.textContent ?? "")).replaceAll("−", "-");
  const click = (): void =>
    saveCsv(
      name,
      [...shown.querySelectorAll("tr")].map((row) => [...row.cells].map(words)),
    );
  return el("button", { type: "button", class: "csv", "aria-label": `Save ${name} as CSV`, click }, "CSV");
}

/** Offer a file to be saved. */
export function save(name: string, content: string | Blob, type = "text/plain"): void {
  const url = URL.createObjectURL(typeof content === "string" ? new Blob([content], { type }) : content);
  el("a", { href: url, download: name }).click();
  window.setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** A section of the page with a heading and a description. */
export function section(id: string, title: string, about: string, ...children: Child[]): HTMLElement {
  return el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    about ? el("p", { class: "about" }, about) : null,
    ...children,
  );
}

let made = 0;
/** An id that is unique on the page. */
export const fresh = (word: string): string => `${word}-${++made}`;
