// Colours of groups and of the page, in light and dark; canvases ask here, elements use the style sheet's variables.

const LIGHT = [
  "#0f766e",
  "#c2571a",
  "#5b5bd6",
  "#b0256b",
  "#8a6d00",
  "#1d6fb8",
  "#6b7a10",
  "#8b46b5",
  "#a3422f",
  "#44616f",
];
const DARK = [
  "#4cc9bd",
  "#f29a5c",
  "#a5a8ff",
  "#f285b5",
  "#e0bd4b",
  "#79b8f2",
  "#bccb5a",
  "#cf9df0",
  "#ee9683",
  "#a3bfcc",
];
const NONE = { light: "#5f6b76", dark: "#9aa7b2" };

const query = window.matchMedia("(prefers-color-scheme: dark)");
const printing = window.matchMedia("print");

export const isDark = (): boolean => query.matches && !printing.matches;

/** The colour of a group; beyond ten they come again. */
export function groupColour(group: number, resolved = true): string {
  if (!resolved) return isDark() ? NONE.dark : NONE.light;
  return (isDark() ? DARK : LIGHT)[group % LIGHT.length];
}

/** A variable of the style sheet. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A colour between two of the style sheet, from 0 to 1: how unlike the others a site is. */
export function shade(level: number): string {
  const [from, to] = [rgb(colour("like")), rgb(colour("unlike"))];
  return `rgb(${from.map((one, k) => Math.round(one + level * (to[k] - one))).join(" ")})`;
}

/** Run when the page turns dark, light or to paper. */
export function onTheme(listener: () => void): void {
  query.addEventListener("change", listener);
  printing.addEventListener("change", listener);
}

/** Red, green and blue of a colour like #0f766e. */
export function rgb(text: string): [number, number, number] {
  const value = Number.parseInt(text.replace("#", ""), 16);
  return [(value >> 16) & 255, (value >> 8) & 255, value & 255];
}
