// Small SVG charts, with colours from the style sheet.
import type { ScaleContinuousNumeric } from "d3-scale";
import { el, fixed, save, short, svg, tick } from "./dom";
import { onLook, onPaper } from "./theme";

export type Scale = ScaleContinuousNumeric<number, number>;

/** The width of paper between its margins (style.css), in pixels. */
const PAPER = 680;

/** The width of a chart: that of the page's text, at most as wide as style.css lets it be. */
export const room = (most = 1184): number => {
  const width = document.documentElement.clientWidth;
  const text = onPaper() ? PAPER : width - (width > 560 ? 56 : 36);
  return Math.max(Math.min(most, text), 280);
};

/** Whether the page is as narrow as a phone. */
export const narrow = (): boolean => room() < 560;

/** A name as it fits: cut where the page is narrow. */
export const fitting = (name: string): string => (narrow() ? short(name, 18) : name);

/** An SVG picture that a screen reader announces with one sentence. */
export function picture(width: number, height: number, label: string): SVGSVGElement {
  return svg("svg", {
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": label,
    class: "chart",
  });
}

/** A picture with a button that saves it as an SVG file. */
export function withDownload(chart: SVGSVGElement, name: string): HTMLElement {
  const button = el("button", { type: "button", class: "save", "aria-label": `Save ${name} as SVG` }, "SVG");
  button.addEventListener("click", () => save(`${name}.svg`, standalone(chart), "image/svg+xml"));
  return el("div", { class: "drawing" }, chart, button);
}

/** A copy that needs no style sheet: its elements contain the computed styles. */
function standalone(chart: SVGSVGElement): string {
  const copy = chart.cloneNode(true) as SVGSVGElement;
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const made = copy.querySelectorAll<SVGElement>("*");
  chart.querySelectorAll("*").forEach((one, k) => {
    const style = getComputedStyle(one);
    for (const name of [
      "fill",
      "stroke",
      "stroke-width",
      "stroke-dasharray",
      "font-size",
      "font-family",
      "font-weight",
      "opacity",
    ])
      made[k].style.setProperty(name, style.getPropertyValue(name));
  });
  return new XMLSerializer().serializeToString(copy);
}

/** Ticks along the bottom, with grid lines and labels that do not overlap. */
export function bottomAxis(scale: Scale, top: number, bottom: number, title: string, count = 5): SVGGElement {
  const group = svg("g", { class: "axis" });
  const ticks = axisTicks(scale, count);
  const words = tickWords(ticks, scale);
  const longest = Math.max(...words.map((one) => one.length), 1);
  const apart = Math.min(...ticks.slice(1).map((one, k) => Math.abs(scale(one) - scale(ticks[k]))));
  const every = Math.max(Math.ceil((LETTER * longest + 10) / apart), 1);
  ticks.forEach((one, k) => {
    const x = scale(one);
    group.append(svg("line", { x1: x, x2: x, y1: top, y2: bottom }));
    if (k % every === 0) group.append(svg("text", { x, y: bottom + 16, "text-anchor": "middle" }, words[k]));
  });
  const [left, right] = scale.range();
  const middle = (left + right) / 2;
  const letters = Math.floor((2 * Math.min(middle, right + 40 - middle)) / LETTER);
  const whole = titled(title, scale);
  // where a page is narrow, the words around the picture say what a coefficient acts on
  const shown = whole.length <= letters ? whole : short(titled(title.split(": ")[0], scale), letters);
  group.append(svg("text", { x: middle, y: bottom + 34, "text-anchor": "middle" }, shown));
  return group;
}

/** Width of a digit next to an axis. */
const LETTER = 7;

/** The power of ten of an axis with huge or tiny numbers; its title names it. */
export function powerOf(scale: Scale): number {
  const most = Math.max(...scale.domain().map(Math.abs));
  return "base" in scale || most === 0 || (most < 1e5 && most >= 1e-3) ? 0 : 3 * Math.floor(Math.log10(most) / 3);
}

/** A value next to the axis, in its power of ten. */
export function valueOn(scale: Scale, value: number | null, decimals: number): string {
  const power = powerOf(scale);
  return fixed(value === null ? null : value / 10 ** power, decimals + power);
}

/** Tick labels with enough decimals to differ, in the power of ten of the axis. */
function tickWords(ticks: number[], scale: Scale): string[] {
  if ("base" in scale || ticks.length < 2) return ticks.map(tick);
  const unit = 10 ** powerOf(scale);
  const step = Math.abs(ticks[1] - ticks[0]) / unit;
  return ticks.map((one) => fixed(one / unit, Math.min(-Math.floor(Math.log10(step) + 1e-9), 12)));
}

const titled = (title: string, scale: Scale): string =>
  powerOf(scale) ? `${title} (× 10${raised(powerOf(scale))})` : title;

const raised = (power: number): string =>
  String(power).replace(/./g, (one) => (one === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(one)]));

/** The limit at which to cut sizes so that a few huge ones do not flatten the rest; infinity if none are huge. */
export function cutAt(sizes: number[]): number {
  const sorted = sizes.map(Math.abs).sort((a, b) => b - a);
  const usual = sorted[Math.ceil(sorted.length / 10)] ?? 0;
  return usual > 0 && sorted[0] > 5 * usual ? 2 * usual : Number.POSITIVE_INFINITY;
}

/** Ticks of a logarithmic scale: powers of ten, and others only if there are fewer than two powers. */
function axisTicks(scale: Scale, count: number): number[] {
  const ticks = scale.ticks(count);
  if (!("base" in scale)) return ticks;
  const powers = ticks.filter((one) => Math.abs(Math.log10(one) - Math.round(Math.log10(one))) < 1e-9);
  return powers.length >= 2 ? powers : ticks.filter((_, k) => k % Math.ceil(ticks.length / count) === 0);
}

/** Ticks along the left side, with grid lines. */
export function leftAxis(scale: Scale, left: number, right: number, title: string, count = 4): SVGGElement {
  const group = svg("g", { class: "axis" });
  const ticks = axisTicks(scale, count);
  const words = tickWords(ticks, scale);
  ticks.forEach((one, k) => {
    const y = scale(one);
    group.append(
      svg("line", { x1: left, x2: right, y1: y, y2: y }),
      svg("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, words[k]),
    );
  });
  const [bottom, top] = scale.range();
  group.append(svg("text", { x: left, y: Math.min(bottom, top) - 10 }, titled(title, scale)));
  return group;
}

/** The limits of some numbers, widened a little; never empty. */
export function extent(values: (number | null | undefined)[], pad = 0.06, log = false): [number, number] {
  const known = values.filter((one): one is number => one !== null && one !== undefined && Number.isFinite(one));
  if (!known.length) return [0, 1];
  const [low, high] = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
  if (log && low > 0) {
    const wide = Math.max((high / low) ** pad, 1.02);
    return [low / wide, high * wide];
  }
  const room = (high - low || Math.abs(high) || 1) * pad;
  return [low - room, high + room];
}

/** Call a function with the width of an element whenever that changes; on paper, half of the text's width. */
export function onWidth(element: HTMLElement, most: number, draw: (width: number) => void): void {
  let last = 0;
  const fit = (): void => {
    const width = Math.min(onPaper() ? PAPER / 2 - 12 : element.clientWidth, most);
    if (width > 0 && Math.abs(width - last) > 1) {
      last = width;
      draw(width);
    }
  };
  new ResizeObserver(fit).observe(element);
  onLook(fit);
}

/** Make a canvas as sharp as the screen, and return its context in CSS pixels. */
export function resize(element: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = Math.max(window.devicePixelRatio || 1, 1);
  element.width = Math.round(width * ratio);
  element.height = Math.round(height * ratio);
  element.style.width = `${width}px`;
  element.style.height = `${height}px`;
  const context = element.getContext("2d")!;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
