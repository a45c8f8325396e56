// Line charts: curves with bands, on linear or logarithmic axes.
import { scaleLinear, scaleLog } from "d3-scale";
import { area, curveLinear, curveStepAfter, line } from "d3-shape";
import { bottomAxis, leftAxis, picture, type Scale } from "./chart";
import { svg } from "./dom";

type Value = number | null | undefined;

export interface Series {
  name: string;
  at: Value[];
  mean: Value[];
  low?: Value[] | null;
  high?: Value[] | null;
}

interface Axis {
  domain: [number, number];
  title: string;
  log?: boolean;
}

interface Options {
  label: string;
  size: [number, number];
  x: Axis;
  /** Without it there are no marks on the left. */
  y: Axis;
  step?: boolean;
  points?: boolean;
  /** A vertical line with words. */
  mark?: { at: number; words: string } | null;
}

const scaled = (axis: Axis, range: [number, number]): Scale =>
  (axis.log ? scaleLog() : scaleLinear()).domain(axis.domain).range(range);

/** Draw curves, the first one in front; the second one is dashed. */
export function lineChart(series: Series[], options: Options): { chart: SVGSVGElement; x: Scale; y: Scale } {
  const [width, height] = options.size;
  const legend = series.length > 1;
  const [left, right, top, bottom] = [58, width - 14, legend ? 58 : 34, height - 44];
  const x = scaled(options.x, [left, right]);
  const y = scaled(options.y, [bottom, top]);
  const chart = picture(width, height, options.label);
  chart.append(bottomAxis(x, top, bottom, options.x.title, width < 560 ? 4 : 6));
  if (options.y.title || series.length) chart.append(leftAxis(y, left, right, options.y.title));
  const shape = options.step ? curveStepAfter : curveLinear;
  const usable = (value: Value, log?: boolean): value is number =>
    typeof value === "number" && Number.isFinite(value) && !(log && value <= 0);
  [...series].reverse().forEach((one, back) => {
    const second = back < series.length - 1;
    const places = one.at
      .map((_, k) => k)
      .filter((k) => usable(one.at[k], options.x.log) && usable(one.mean[k], options.y.log));
    const across = (k: number): number => x(one.at[k] as number);
    if (one.low && one.high) {
      const band = area<number>()
        .x(across)
        .y0((k) => y(one.low?.[k] ?? 0))
        .y1((k) => y(one.high?.[k] ?? 0));
      chart.append(svg("path", { d: band.curve(shape)(places) ?? "", class: `band${second ? " second" : ""}` }));
    }
    const middle = line<number>()
      .x(across)
      .y((k) => y(one.mean[k] as number));
    const style = { class: `curve${second ? " second" : ""}`, "stroke-dasharray": second ? "7 4" : null };
    chart.append(svg("path", { d: middle.curve(shape)(places) ?? "", ...style }));
    if (options.points)
      for (const k of places)
        chart.append(svg("circle", { cx: across(k), cy: y(one.mean[k] as number), r: 2.5, class: "point" }));
    if (legend) {
      const start = left + (second ? Math.min(260, (right - left) / 2) : 0);
      chart.append(
        svg("line", { x1: start, x2: start + 22, y1: 14, y2: 14, ...style }),
        svg("text", { x: start + 28, y: 18 }, one.name),
      );
    }
  });
  if (options.mark) {
    const at = x(options.mark.at);
    const anchor = at > (left + right) / 2 ? "end" : "start";
    chart.append(
      svg(
        "g",
        { class: "mark" },
        svg("line", { x1: at, x2: at, y1: top, y2: bottom }),
        svg("text", { x: at, y: top - 8, "text-anchor": anchor }, options.mark.words),
      ),
    );
  }
  return { chart, x, y };
}
