// The scale of effects: per unit or per standard deviation of a column, additive or as ratios.
import { extent } from "./chart";
import type { Model } from "./data";
import { choice, decimalsFor, el, fixed } from "./dom";
import { valueScale } from "./dots";

export interface Effect {
  value: number;
  low: number | null;
  high: number | null;
}

export class Effects {
  perDeviation = false;
  ratio = false;
  private readonly listeners: (() => void)[] = [];

  constructor(readonly model: Model) {}

  /** The names of the two scales; null if effects are additive only. */
  private get scales(): [string, string] | null {
    const { link, loss } = this.model.payload.about;
    if (link === "logit" || link === "softmax") return ["log-odds", "odds ratio"];
    if (link !== "log") return null;
    return loss === "cox" ? ["log hazard", "hazard ratio"] : ["log of the mean", "ratio of means"];
  }

  /** The value of no effect. */
  get none(): number {
    return this.ratio ? 1 : 0;
  }

  factor(feature: number): number {
    return this.perDeviation ? (this.model.payload.coefficients.deviations?.[feature] ?? 1) : 1;
  }

  show(value: number, feature: number): number {
    const scaled = value * this.factor(feature);
    return this.ratio ? Math.exp(scaled) : scaled;
  }

  /** An estimate with the ends of its interval, if it has one. */
  at(site: number, feature: number): Effect {
    return this.around(this.model.estimate(site, feature), this.model.half(site, feature), feature);
  }

  /** A value on the scale shown, with an interval of this half width. */
  around(value: number, half: number | null, feature: number): Effect {
    const known = half !== null && Number.isFinite(half);
    return {
      value: this.show(value, feature),
      low: known ? this.show(value - half, feature) : null,
      high: known ? this.show(value + half, feature) : null,
    };
  }

  /** Decimals for a coefficient: two digits of a typical half width. */
  decimals(feature: number): number {
    const all = this.model.names.map((_, site) => this.at(site, feature));
    const halves = all
      .map((one) => (one.low === null || one.high === null ? 0 : (one.high - one.low) / 2))
      .sort((a, b) => a - b);
    return decimalsFor(
      [halves[halves.length >> 1]],
      all.map((one) => one.value),
    );
  }

  /** The name of a coefficient with its unit. */
  title(feature: number): string {
    const { names, units, deviations } = this.model.payload.coefficients;
    if (this.perDeviation && deviations?.[feature]) return `${names[feature]} (per standard deviation)`;
    return units[feature] ? `${names[feature]} (per ${units[feature]})` : names[feature];
  }

  /** The title of an axis: the coefficient, and the scale or the target. */
  axis(feature: number): string {
    const { target } = this.model.payload.coefficients;
    const scale = this.scales?.[this.ratio ? 1 : 0] ?? (target ? `effect on ${target}` : "effect");
    return `${this.title(feature)}: ${scale}`;
  }

  /** An axis for some sites and the value of no effect; logarithmic for ratios. */
  scale(effects: Effect[], range: [number, number], pad = 0.03) {
    const ends = effects.flatMap(({ value, low, high }) => [value, low ?? value, high ?? value]);
    return valueScale(extent([this.none, ...ends], pad, this.ratio), range, this.ratio);
  }

  listen(listener: () => void): void {
    this.listeners.push(listener);
  }

  /** Buttons to choose the scale; null if there is only one. */
  controls(): HTMLElement | null {
    const told = (): void => {
      for (const listener of this.listeners) listener();
    };
    const all = [
      this.model.payload.coefficients.deviations &&
        choice(
          "Unit of effects",
          [
            ["per unit", false],
            ["per standard deviation", true],
          ],
          false,
          (on) => {
            this.perDeviation = on;
            told();
          },
        ),
      this.scales &&
        choice(
          "Scale of effects",
          [
            [this.scales[0], false],
            [this.scales[1], true],
          ],
          false,
          (on) => {
            this.ratio = on;
            told();
          },
        ),
    ].filter((one): one is HTMLElement => Boolean(one));
    return all.length ? el("div", { class: "bar" }, ...all) : null;
  }
}

export const interval = ({ low, high }: Effect, decimals: number): string =>
  low === null || high === null ? "–" : `${fixed(low, decimals)} to ${fixed(high, decimals)}`;
