// Elements without HTML as text: whatever a site is called stays text.

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

/** A number for people: three significant digits, a true minus. */
export function fmt(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  let text: string;
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) text = value.toExponential(digits - 1);
  else if (size >= 10 ** digits) text = value.toFixed(0);
  else text = value === 0 ? "0" : value.toPrecision(digits);
  return text.replaceAll("-", "−").replace("e+", "e");
}

/** Decimals that show a typical error with two digits; a typical value with three where no error is known. */
export function decimalsFor(errors: (number | null | undefined)[], values: (number | null | undefined)[] = []): number {
  const sizes = (numbers: typeof errors): number[] =>
    numbers.map((one) => Math.abs(one ?? 0)).filter((one) => one > 0 && Number.isFinite(one));
  const [known, all] = [sizes(errors), sizes(values).sort((a, b) => a - b)];
  const power = known.length
    ? Math.floor(Math.log10(known.sort((a, b) => a - b)[known.length >> 1])) - 1
    : Math.floor(Math.log10(all[all.length >> 1] ?? 1)) - 2;
  return Math.min(Math.max(-power, 0), 8);
}

/** A number with a fixed number of decimals, so that columns line up; a power of ten where it is huge. */
export function fixed(value: number | null | undefined, decimals: number): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 1e6) return fmt(value);
  const text = value.toFixed(decimals);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "−");
}

/** A probability or a share: never 0 or 1 by rounding. */
export const share = (value: number): string => (value > 0.995 ? ">0.99" : value < 0.005 ? "<0.01" : value.toFixed(2));

/** A number next to an axis: without zeros at its end. */
export function tick(value: number): string {
  const text = fmt(value);
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text.replace(/\.0*e/, "e");
}

export const whole = (value: number): string => value.toLocaleString("en-US");

export const plural = (count: number, word: string): string => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;

/** Offer a file to be saved. */
export function save(name: string, content: string | Blob, type = "text/plain"): void {
  const url = URL.createObjectURL(typeof content === "string" ? new Blob([content], { type }) : content);
  el("a", { href: url, download: name }).click();
  window.setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** A section of the page with a heading, and a line under it that says what is to be seen. */
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
/** An id that nothing else on the page has. */
export const fresh = (word: string): string => `${word}-${++made}`;
