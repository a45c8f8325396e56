// Small charts in SVG: axes with few words, colours from the style sheet.
import type { ScaleContinuousNumeric } from "d3-scale";
import { el, save, tick as short, svg } from "./dom";

type Scale = ScaleContinuousNumeric<number, number>;

/** The width of a chart: on a phone as wide as the page, so that its words stay as large as the text. */
export const room = (most: number): number => Math.max(Math.min(most, document.documentElement.clientWidth - 36), 280);

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

/** A copy that needs no style sheet: what the browser has computed is written into its elements. */
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

/** Ticks along the bottom, with hair lines through the chart; no two of their words touch. */
export function bottomAxis(scale: Scale, top: number, bottom: number, title: string, count = 5): SVGGElement {
  const group = svg("g", { class: "axis" });
  const ticks = scale.ticks(count);
  const { words, power } = tickWords(ticks, "base" in scale);
  const longest = Math.max(...words.map((one) => one.length), 1);
  const apart = ticks.length > 1 ? Math.abs(scale(ticks[1]) - scale(ticks[0])) : Number.POSITIVE_INFINITY;
  const every = Math.max(Math.ceil((LETTER * longest + 10) / apart), 1);
  ticks.forEach((tick, k) => {
    const x = scale(tick);
    group.append(svg("line", { x1: x, x2: x, y1: top, y2: bottom }));
    if (k % every === 0) group.append(svg("text", { x, y: bottom + 16, "text-anchor": "middle" }, words[k]));
  });
  const [left, right] = scale.range();
  const whole = power ? `${title} (× 10${raised(power)})` : title;
  group.append(svg("text", { x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle", class: "title" }, whole));
  return group;
}

/** Width of a digit next to an axis. */
const LETTER = 7;

/** Ticks in words: as many decimals as they need to differ, a power of ten apart where they are huge or tiny. */
function tickWords(ticks: number[], log: boolean): { words: string[]; power: number } {
  const most = Math.max(...ticks.map(Math.abs), 0);
  if (log || ticks.length < 2 || most === 0) return { words: ticks.map(short), power: 0 };
  const power = most >= 1e5 || most < 1e-3 ? 3 * Math.floor(Math.log10(most) / 3) : 0;
  const step = Math.abs(ticks[1] - ticks[0]) / 10 ** power;
  const decimals = Math.min(Math.max(-Math.floor(Math.log10(step) + 1e-9), 0), 12);
  return { words: ticks.map((one) => (one / 10 ** power).toFixed(decimals).replace("-", "−")), power };
}

const raised = (power: number): string =>
  String(power).replace(/./g, (one) => (one === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(one)]));

/** Where to cut some sizes so that a few huge ones do not flatten the rest; infinity where there is no need to. */
export function cutAt(sizes: number[]): number {
  const sorted = sizes.map(Math.abs).sort((a, b) => b - a);
  const usual = sorted[Math.ceil(sorted.length / 10)] ?? 0;
  return usual > 0 && sorted[0] > 5 * usual ? 2 * usual : Number.POSITIVE_INFINITY;
}

/** A logarithmic scale offers ticks between powers of ten too: only where there are not two powers they are taken. */
function leftTicks(scale: Scale, count: number): number[] {
  const ticks = scale.ticks(count);
  if (!("base" in scale)) return ticks;
  const powers = ticks.filter((one) => Math.abs(Math.log10(one) - Math.round(Math.log10(one))) < 1e-9);
  return powers.length >= 2 ? powers : ticks.filter((_, k) => k % Math.ceil(ticks.length / count) === 0);
}

/** Ticks along the left side, with hair lines. */
export function leftAxis(scale: Scale, left: number, right: number, title: string, count = 4): SVGGElement {
  const group = svg("g", { class: "axis" });
  for (const tick of leftTicks(scale, count)) {
    const y = scale(tick);
    group.append(
      svg("line", { x1: left, x2: right, y1: y, y2: y }),
      svg("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, short(tick)),
    );
  }
  const [bottom, top] = scale.range();
  group.append(svg("text", { x: left, y: Math.min(bottom, top) - 10, class: "title" }, title));
  return group;
}

/** The limits of some numbers, widened a little; never empty. */
export function extent(values: (number | null | undefined)[], pad = 0.06): [number, number] {
  let low = Number.POSITIVE_INFINITY;
  let high = Number.NEGATIVE_INFINITY;
  for (const value of values) {
    if (value === null || value === undefined || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * pad;
  return [low - room, high + room];
}

/** A canvas as sharp as the screen, and its context in CSS pixels. */
export function canvas(width: number, height: number): [HTMLCanvasElement, CanvasRenderingContext2D] {
  const element = document.createElement("canvas");
  return [element, resize(element, width, height)];
}

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
