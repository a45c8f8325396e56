// Colours and shapes of groups, and colours of the page, in light and dark; canvases use these, elements use the style
// sheet's variables.
import { svg } from "./dom";

// The palette of Okabe and Ito, without its yellow, in tones that show on each background.
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#8a6200", "#b8588f", "#3a9bd6", "#4d4d4d"];
const DARK = ["#56b4e9", "#ee8a3c", "#2cc79a", "#f0c545", "#c8c8c8", "#e29cc3", "#9ad4f7"];
const NONE = { light: "#5f6b76", dark: "#9aa7b2" };

const query = window.matchMedia("(prefers-color-scheme: dark)");
const printing = window.matchMedia("print");

let paper = false;

export const onPaper = (): boolean => paper || printing.matches;
export const isDark = (): boolean => query.matches && !onPaper();

/** The colour of a group. Seven colours and four shapes (`groupShape`) make 28 marks that differ. */
export function groupColour(group: number, resolved = true): string {
  if (!resolved) return isDark() ? NONE.dark : NONE.light;
  return (isDark() ? DARK : LIGHT)[group % LIGHT.length];
}

/** The outline of a group's mark with radius r around (0, 0): circle, square, triangle or diamond. */
export function groupShape(group: number, r: number, resolved = true): string {
  const [a, b, c] = [0.89 * r, 1.25 * r, 1.1 * r].map((one) => one.toFixed(2));
  const circle = `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`;
  const square = `M-${a} -${a}H${a}V${a}H-${a}z`;
  const triangle = `M0 -${b}L${c} ${(0.72 * r).toFixed(2)}H-${c}z`;
  const diamond = `M0 -${b}L${b} 0L0 ${b}L-${b} 0z`;
  return resolved ? [circle, square, triangle, diamond][group % 4] : circle;
}

/** A group's mark as a small picture to put before words. */
export function groupMark(group: number, resolved = true): SVGSVGElement {
  const path = svg("path", { d: groupShape(group, 4.6, resolved), fill: groupColour(group, resolved) });
  return svg("svg", { viewBox: "-6 -6 12 12", width: 12, height: 12, class: "swatch", "aria-hidden": true }, path);
}

/** A variable of the style sheet. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A colour between two of the style sheet, for a distance from 0 to 1. */
export function shade(level: number): string {
  const [from, to] = [rgb(colour("like")), rgb(colour("unlike"))];
  return `rgb(${from.map((one, k) => Math.round(one + level * (to[k] - one))).join(" ")})`;
}

/** Run a function when the page changes to dark, light or paper, or gets another width. */
export function onLook(listener: () => void): void {
  for (const one of [query, printing]) one.addEventListener("change", listener);
  // pages of paper are counted before a style sheet for print applies
  for (const [name, now] of [
    ["beforeprint", true],
    ["afterprint", false],
  ] as const)
    window.addEventListener(name, () => {
      paper = now;
      listener();
    });
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width && !onPaper()) listener();
    width = window.innerWidth;
  });
}

/** Red, green and blue of a colour like #0f766e. */
export function rgb(text: string): [number, number, number] {
  const value = Number.parseInt(text.replace("#", ""), 16);
  return [(value >> 16) & 255, (value >> 8) & 255, value & 255];
}
