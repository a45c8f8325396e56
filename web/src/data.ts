// What a page embeds (made by fedkin/report/payload.py), and how its arrays are read.

export interface Method {
  name: string;
  mean: number | null;
  standard_error: number | null;
  difference: number | null;
  difference_error: number | null;
}

export interface Comparison {
  metric: string;
  repeats: number | null;
  test_size: number | null;
  verdict: string;
  methods: Method[];
  sites: Record<string, (number | null)[]>;
  /** Gain of Fedkin over Local at every site, positive where Fedkin is better; null where rows cannot decide. */
  gains: (number | null)[] | null;
  gain_errors: (number | null)[] | null;
  /** Sites whose rows all have the same target, so that held-out rows cannot decide whether they gain. */
  constant: number[];
  more: Record<string, Record<string, number | null>>;
}

export interface Trust {
  tone: "good" | "fair" | "bad";
  title: string;
  words: string;
}

export type Places =
  | { kind: "tiles"; codes: string[]; tiles: [string, number, number][] }
  | { kind: "points"; globe: boolean; x: number[]; y: number[] };

/** Survival at the times of the page; a site of null is a new one. */
export interface Curve {
  site: number | null;
  mean: number[];
  low: number[] | null;
  high: number[] | null;
}

interface Payload {
  headline: string;
  lead: string;
  method: "kin" | "fused";
  resolved: boolean;
  about: {
    sites: number;
    rows: number;
    features: number;
    groups: number;
    target: string | null;
    loss: string;
    link: string | null;
    classes: string[] | null;
  };
  sites: {
    names: string[];
    rows: number[];
    groups: number[];
    districts: string[] | null;
    notes: Record<string, string[]>;
  };
  order: number[];
  matrix: { kind: "pairs"; values: string } | { kind: "blocks"; starts: number[]; values: string };
  nearest: { each: number; sites: string; values: string } | null;
  edges: {
    what: "kept" | "likely";
    n_kept: number;
    n_candidates: number | null;
    n_dropped: number | null;
    kept: string;
    dropped: string | null;
    complete: boolean;
  };
  places: Places | null;
  coefficients: {
    /** The coefficient to show first. */
    first: number;
    /** Without groups: distances of sites from the mean, from 0 to 1. */
    unlike: number[] | null;
    names: string[];
    units: string[];
    target: string | null;
    level: number;
    estimates: string;
    halves: string | null;
    differences: string | null;
    mean: (number | null)[];
    sd: (number | null)[];
    /** With kin: ends of the intervals of the population means, and standard deviations of the population. */
    population: { low: (number | null)[]; high: (number | null)[]; sd: (number | null)[] } | null;
    left_out: number;
    /** Standard deviations of the columns over all rows, where the fit kept them. */
    deviations: (number | null)[] | null;
  };
  comparison: Comparison | null;
  survival: { time: string; level: number; times: number[]; left_out: number; curves: Curve[] } | null;
  path: {
    lam: number | null;
    choice: { lams: number[]; mean: number[]; error: number[]; rule: string } | null;
    groups: { lams: number[]; counts: number[]; labels: number[][] | null } | null;
  } | null;
  trust: Trust[];
  reproduction: { facts: Record<string, string>; command: string | null; options: Record<string, string> };
}

function bytes(text: string): Uint8Array {
  const raw = atob(text);
  const out = new Uint8Array(raw.length);
  for (let k = 0; k < raw.length; k++) out[k] = raw.charCodeAt(k);
  return out;
}

const floats = (text: string): Float32Array => new Float32Array(bytes(text).buffer);
const whole = (text: string): Int32Array => new Int32Array(bytes(text).buffer);

/** As in payload.py: the ratio that the byte 255 stands for. */
const MOST_RATIO = 4;

/** A model as the page sees it. Sites are numbers from 0; groups too, the largest is 0. */
export class Model {
  readonly n: number;
  readonly names: string[];
  readonly groups: number[];
  readonly members: number[][];
  readonly p: number;
  readonly estimates: Float32Array;
  readonly halves: Float32Array | null;
  readonly kept: Int32Array;
  readonly dropped: Int32Array | null;
  readonly rank: number[];
  private readonly shares: Uint8Array;
  private readonly differences: Uint8Array | null;
  private readonly near: { each: number; sites: Int32Array; values: Uint8Array } | null;

  constructor(readonly payload: Payload) {
    this.names = payload.sites.names;
    this.n = this.names.length;
    this.groups = payload.sites.groups;
    this.members = [];
    this.groups.forEach((group, site) => {
      this.members[group] ??= [];
      this.members[group].push(site);
    });
    this.p = payload.coefficients.names.length;
    this.estimates = floats(payload.coefficients.estimates);
    this.halves = payload.coefficients.halves === null ? null : floats(payload.coefficients.halves);
    const { differences } = payload.coefficients;
    this.differences = differences === null ? null : bytes(differences);
    this.kept = whole(payload.edges.kept);
    this.dropped = payload.edges.dropped === null ? null : whole(payload.edges.dropped);
    this.shares = bytes(payload.matrix.values);
    const near = payload.nearest;
    this.near = near && { each: near.each, sites: whole(near.sites), values: bytes(near.values) };
    this.rank = new Array(this.n);
    payload.order.forEach((site, place) => {
      this.rank[site] = place;
    });
  }

  estimate(site: number, feature: number): number {
    return this.estimates[site * this.p + feature];
  }

  half(site: number, feature: number): number | null {
    return this.halves === null ? null : this.halves[site * this.p + feature];
  }

  /** Whether the page has the correlations of errors of two sites; otherwise it treats them as independent. */
  get knowsDifferences(): boolean {
    return this.differences !== null;
  }

  /** Half the interval of the difference of two sites. */
  halfOfDifference(a: number, b: number, feature: number): number | null {
    const [x, y] = [this.half(a, feature), this.half(b, feature)];
    if (x === null || y === null) return null;
    if (this.differences === null) return Math.hypot(x, y);
    const [i, j] = a > b ? [a, b] : [b, a];
    const byte = this.differences[((i * (i - 1)) / 2 + j) * this.p + feature];
    return Math.hypot(x, y) * MOST_RATIO * (byte / 255) ** 2;
  }

  /** Number of cells per side of the matrix. */
  get cells(): number {
    const matrix = this.payload.matrix;
    return matrix.kind === "pairs" ? this.n : matrix.starts.length - 1;
  }

  /** The sites of a line of the matrix, as places in the order: from the first to before the last. */
  range(cell: number): [number, number] {
    const matrix = this.payload.matrix;
    return matrix.kind === "pairs" ? [cell, cell + 1] : [matrix.starts[cell], matrix.starts[cell + 1]];
  }

  /** The share between 0 and 1 in a cell of the matrix, lines and columns in display order. */
  cell(line: number, column: number): number {
    if (this.payload.matrix.kind === "blocks") return this.shares[line * this.cells + column] / 255;
    return this.share(this.payload.order[line], this.payload.order[column]) ?? 0;
  }

  /** The share of a pair of sites; null if the page does not have it. */
  share(a: number, b: number): number | null {
    if (a === b) return 1;
    if (this.payload.matrix.kind === "pairs") {
      const [i, j] = a > b ? [a, b] : [b, a];
      return this.shares[(i * (i - 1)) / 2 + j] / 255;
    }
    const near = this.near;
    if (near) {
      for (let k = 0; k < near.each; k++) {
        if (near.sites[a * near.each + k] === b) return near.values[a * near.each + k] / 255;
      }
    }
    return null;
  }

  /** The sites most similar to a site, most similar first. */
  nearest(site: number, most: number): { site: number; share: number }[] {
    const near = this.near;
    if (near) {
      return Array.from({ length: Math.min(most, near.each) }, (_, k) => ({
        site: near.sites[site * near.each + k],
        share: near.values[site * near.each + k] / 255,
      }));
    }
    return this.names
      .map((_, other) => ({ site: other, share: this.share(site, other) ?? 0 }))
      .filter((one) => one.site !== site)
      .sort((a, b) => b.share - a.share)
      .slice(0, most);
  }

  groupName(group: number): string {
    return this.payload.resolved ? `Group ${group + 1}` : "All sites";
  }
}

export function readModel(text: string): Model {
  return new Model(JSON.parse(text) as Payload);
}
