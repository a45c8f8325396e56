// Dot plots: a line per site with its name, an interval, a mark and its value.
import { scaleLinear, scaleLog } from "d3-scale";
import { bottomAxis, cutAt, extent, picture, room, type Scale, valueOn } from "./chart";
import type { Model } from "./data";
import { fixed, plural, short, svg } from "./dom";
import type { State } from "./state";

export interface Dot {
  site: number;
  value: number;
  low: number | null;
  high: number | null;
}

/** Width of a letter of a name. */
const LETTER = 6.8;

/** Number of sites to draw; of more, those at the two ends. */
const MOST = 60;

/** The ends of a sorted list, and a sentence if some of it is left out. */
export function twoEnds<T>(all: T[]): { some: T[]; left: number; words: string } {
  if (all.length <= MOST) return { some: all, left: 0, words: "" };
  const some = [...all.slice(0, MOST / 2), ...all.slice(-MOST / 2)];
  return { some, left: all.length - MOST, words: ` ${MOST} of ${all.length} sites are drawn: those at the two ends.` };
}

interface Options {
  /** What a screen reader announces. */
  label: string;
  /** Title of the axis. */
  title: string;
  decimals: number;
  /** A vertical line and its class in style.css. */
  line: { at: number; class: string };
  /** Whether marks show the sign of the value. */
  signed?: boolean;
  /** Whether the axis is logarithmic: ratios. */
  log?: boolean;
  /** Number of sites left out in the middle. */
  left?: number;
}

/** A scale of values, from left to right. */
export function valueScale(ends: [number, number], range: [number, number], log: boolean): Scale {
  return log && ends[0] > 0 ? scaleLog().domain(ends).range(range) : scaleLinear().domain(ends).nice(10).range(range);
}

export const signed = (value: number | null, decimals: number): string =>
  value !== null && value > 0 ? `+${fixed(value, decimals)}` : fixed(value, decimals);

/** Draw sites in the order given; a few huge values are cut, with an arrow at the end of the axis. */
export function siteDots(model: Model, state: State, dots: Dot[], options: Options): SVGSVGElement {
  const { decimals, line, log = false } = options;
  const width = room();
  const row = dots.length > 30 ? 15 : 20;
  const middle = options.left ? dots.length / 2 : dots.length;
  const top = (k: number): number => 8 + row * (k + (k < middle ? 0 : 1.5));
  const bottom = top(dots.length - 1) + row;
  const letters = Math.min(24, Math.floor((0.42 * width - 16) / LETTER));
  const names = dots.map((one) => short(model.names[one.site], letters));
  const left = 16 + LETTER * Math.max(...names.map((one) => one.length));
  const most = log ? Number.POSITIVE_INFINITY : cutAt(dots.map((one) => one.value - line.at));
  const shown = (value: number): number => Math.min(Math.max(value, line.at - most), line.at + most);
  const ends = dots.flatMap((one) => [one.value, one.low ?? one.value, one.high ?? one.value].map(shown));
  const x = valueScale(extent([line.at, ...ends], 0.04, log), [left, width - 76], log);
  const [low, high] = x.domain();
  const inside = (value: number): number => x(Math.min(Math.max(value, low), high));
  const chart = picture(width, bottom + 44, options.label);
  chart.append(bottomAxis(x, 4, bottom, options.title, width < 500 ? 3 : 6));
  chart.append(svg("line", { x1: x(line.at), x2: x(line.at), y1: 4, y2: bottom, class: line.class }));
  if (options.left) {
    const place = { x: (left + width - 76) / 2, y: top(middle) - 0.75 * row + 4, "text-anchor": "middle" };
    const y = top(middle) - 0.75 * row;
    chart.append(
      svg("rect", { x: left, y: y - 0.75 * row, width: width - 76 - left, height: 1.5 * row, class: "gap" }),
      svg("text", place, `${plural(options.left, "site")} not drawn`),
    );
  }
  dots.forEach((one, k) => {
    const y = top(k) + row / 2;
    const sign = options.signed && one.value > 0 ? "+" : "";
    const value = sign + valueOn(x, one.value, decimals);
    const interval = one.low !== null && one.high !== null;
    const range = interval ? ` (${valueOn(x, one.low, decimals)} to ${valueOn(x, one.high, decimals)})` : "";
    const beyond = one.value > high ? 1 : one.value < low ? -1 : 0;
    const end = inside(one.value);
    const mark = beyond
      ? svg("path", { d: `M${end + 6 * beyond} ${y}l${-10 * beyond} -5v10z`, class: "cut" })
      : options.signed && one.value < 0
        ? svg("path", { d: `M${end} ${y - 5}l5 5l-5 5l-5 -5z` })
        : svg("circle", { cx: end, cy: y, r: 4 });
    const group = svg(
      "g",
      { class: `pick ${options.signed && one.value < 0 ? "loss" : "gain"}`, "data-site": one.site },
      svg("title", {}, `${model.names[one.site]}: ${value}${range}`),
      svg("rect", { x: 0, y: y - row / 2, width, height: row, class: "catch" }),
      svg("text", { x: left - 10, y: y + 4, "text-anchor": "end", class: "hint" }, names[k]),
      interval
        ? svg("line", { x1: inside(one.low ?? 0), x2: inside(one.high ?? 0), y1: y, y2: y, class: "whisker" })
        : null,
      mark,
      svg("text", { x: width, y: y + 4, "text-anchor": "end", class: "value" }, value),
    );
    group.addEventListener("click", () => state.choose(one.site));
    group.addEventListener("mouseenter", () => state.hover(one.site));
    group.addEventListener("mouseleave", () => state.hover(null));
    chart.append(group);
  });
  return chart;
}
