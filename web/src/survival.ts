// Survival curves of one row of features at a chosen site and at a new site.
import { room, withDownload } from "./chart";
import type { Model } from "./data";
import { el, fmt, fresh, saveCsv, section, short } from "./dom";
import { lineChart } from "./lines";
import type { State } from "./state";
import { onLook } from "./theme";

export function survivalSection(model: Model, state: State): HTMLElement | null {
  const found = model.payload.survival;
  if (!found) return null;
  const { times, curves, level } = found;
  const id = fresh("curve");
  const chooser = el("select", { id });
  curves.forEach((one, k) => {
    if (one.site !== null) chooser.append(el("option", { value: k }, model.names[one.site]));
  });
  const fresher = curves.find((one) => one.site === null) ?? null;
  const holder = el("div");
  const draw = (): void => {
    const own = curves[Number(chooser.value)];
    const name = model.names[own.site ?? 0];
    const middle = Math.floor(times.length / 2);
    const series = [{ ...own, name: short(name, 30), at: times }];
    if (fresher) series.push({ ...fresher, name: "a new site", at: times });
    const { chart } = lineChart(series, {
      label: `Survival at ${name}: ${fmt(own.mean[middle])} at ${fmt(times[middle])}; at a new site ${fmt(fresher?.mean[middle])}`,
      size: [room(), 340],
      x: { domain: [0, times[times.length - 1]], title: found.time },
      y: { domain: [0, 1], title: "survival probability" },
      step: true,
    });
    holder.replaceChildren(withDownload(chart, "survival"));
  };
  chooser.addEventListener("change", draw);
  state.listen(({ chosen }) => {
    const place = curves.findIndex((one) => one.site !== null && one.site === chosen);
    if (place < 0 || chooser.value === String(place)) return;
    chooser.value = String(place);
    draw();
  });
  draw();
  onLook(draw);
  const click = (): void => {
    const lines = curves.flatMap((one) =>
      times.map((time, k) => [
        one.site === null ? "" : model.names[one.site],
        time,
        one.mean[k],
        one.low?.[k] ?? "",
        one.high?.[k] ?? "",
      ]),
    );
    saveCsv("survival", [["site", "time", "survival", "low", "high"], ...lines]);
  };
  const table = el("button", { type: "button", click }, "CSV");
  const bands = fresher?.low ? ` Bands are ${Math.round(100 * level)}% intervals.` : " A fused model has no intervals.";
  const about = `The probability that the event has not yet occurred, for a row with average features.${bands}`;
  const left = found.left_out ? ` ${found.left_out} more sites are not on this page.` : "";
  const caption = `The dashed curve is that of a new site; its band includes the variance between sites.${left} Steps are at ${times.length} evenly spaced times, not at event times. Lines of the CSV file without a site are those of the new site.`;
  return section(
    "survival",
    "Survival at each site",
    about,
    el("div", { class: "bar" }, el("label", { for: id }, "Site"), chooser, table),
    el("figure", {}, holder, el("figcaption", {}, caption)),
  );
}
