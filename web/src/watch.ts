// A federation while it runs: who is where, who waits for whom, what has travelled.
import {
  forceCollide,
  forceLink,
  forceManyBody,
  forceSimulation,
  forceX,
  forceY,
  type SimulationNodeDatum,
} from "d3-force";
import { scaleLinear, scaleLog } from "d3-scale";
import { line } from "d3-shape";
import { bottomAxis, extent, leftAxis, picture, resize, room } from "./chart";
import { el, fmt, plural, section, svg, whole } from "./dom";
import { colour, onTheme } from "./theme";

type Kind = "running" | "waiting" | "absent" | "trouble" | "done" | "left" | "elsewhere";

interface Site {
  name: string;
  kind: Kind;
  state: string;
  round: number | null;
  change?: number | null;
  waiting_for: string[];
  restarts?: number;
  pulled?: number;
  sent: number;
  why?: string | null;
}

interface Watched {
  kind: "sites" | "run";
  sites: Site[];
  edges: [number, number][];
  round: number;
  rounds: number;
  change?: number | null;
  bytes?: number | null;
  gap?: number | null;
  /** Why there is no gap, where there is none. */
  no_gap?: string | null;
  time: number;
  news: { time: number; words: string }[];
  series: { time: number[]; round: number[]; change: (number | null)[]; bytes: (number | null)[] };
  trace?: Record<string, (number | null)[]>;
}

const WORDS: Record<Kind, string> = {
  running: "running",
  waiting: "waiting",
  absent: "absent",
  trouble: "in trouble",
  done: "done",
  left: "left",
  elsewhere: "elsewhere",
};
const COLOURS: Record<Kind, string> = {
  running: "accent",
  waiting: "warn",
  absent: "gone",
  trouble: "loss",
  done: "done",
  left: "gone",
  elsewhere: "muted",
};

export function startWatch(main: HTMLElement, text: string): void {
  let now = JSON.parse(text) as Watched;
  const stage = new Stage();
  const charts = el("div", { class: "columns" });
  const table = el("tbody");
  const news = el("ol", { class: "news", "aria-live": "polite" });
  const link = el("p", { class: "said", role: "status" });
  main.replaceChildren(
    section(
      "sites",
      "Sites",
      "",
      el("div", { class: "columns" }, stage.element, el("div", {}, el("h3", {}, "News"), news, link)),
      el(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": "All sites" },
        el(
          "table",
          {},
          el("caption", { class: "quiet" }, "All sites"),
          el(
            "thead",
            {},
            el(
              "tr",
              {},
              ...["Site", "State"].map((words) => el("th", { scope: "col" }, words)),
              ...["Round", "Change", "Sent"].map((words) => el("th", { scope: "col", class: "number" }, words)),
              ...["Restarts"].map((words) => el("th", { scope: "col", class: "number" }, words)),
              el("th", { scope: "col" }, "Waits for"),
            ),
          ),
          table,
        ),
      ),
    ),
    section("progress", "Progress", "", charts),
  );
  const draw = (): void => {
    headline(now);
    stage.show(now);
    table.replaceChildren(...now.sites.slice(0, 200).map(row));
    const lines = now.news.slice(0, 8);
    if (!lines.length)
      news.replaceChildren(el("li", { class: "hint" }, "Nothing has happened since this page was opened."));
    else if (news.dataset.first !== String(lines[0].time) + lines[0].words) {
      news.dataset.first = String(lines[0].time) + lines[0].words;
      news.replaceChildren(
        ...lines.map((one) =>
          el("li", {}, el("time", {}, new Date(1000 * one.time).toLocaleTimeString("en-GB")), one.words),
        ),
      );
    }
    charts.replaceChildren(...progress(now));
  };
  draw();
  onTheme(draw);
  const token = new URLSearchParams(window.location.search).get("token") ?? "";
  const source = new EventSource(`/events?token=${encodeURIComponent(token)}`);
  source.onmessage = (event: MessageEvent<string>) => {
    now = JSON.parse(event.data) as Watched;
    link.textContent = "";
    document.body.dataset.live = "yes";
    draw();
  };
  source.onerror = () => {
    link.textContent = "fedkin watch is not there any more; what you see is the last it told.";
    document.body.dataset.live = "no";
  };
  document.body.dataset.ready = "yes";
}

function headline(now: Watched): void {
  const count = (kind: Kind): number => now.sites.filter((one) => one.kind === kind).length;
  const there = now.sites.filter((one) => one.kind !== "left");
  const absent = now.sites.filter((one) => one.kind === "absent");
  const trouble = now.sites.filter((one) => one.kind === "trouble");
  const done = count("done");
  let title: string;
  if (there.length && done === there.length) title = `All ${plural(there.length, "site")} are done.`;
  else if (now.round > 0 || now.rounds > 0) title = `Round ${whole(now.round)} of ${whole(now.rounds)}.`;
  else title = there.length ? `${plural(there.length, "site")}, not started yet.` : "Nothing to see yet.";
  const words: string[] = [];
  const some = (sites: Site[]): string =>
    sites.length > 4 ? plural(sites.length, "site") : sites.map((one) => one.name).join(", ");
  if (trouble.length) words.push(`${some(trouble)} ${trouble.length === 1 ? "needs" : "need"} help.`);
  if (absent.length && done < there.length) words.push(`${some(absent)} ${absent.length === 1 ? "is" : "are"} absent.`);
  const waiting = count("waiting");
  if (waiting) words.push(`${plural(waiting, "site")} ${waiting === 1 ? "waits" : "wait"} for others.`);
  const left = now.sites.filter((one) => one.kind === "left");
  if (left.length) words.push(`${some(left)} ${left.length === 1 ? "has" : "have"} left for good.`);
  if (!words.length && there.length && done < there.length) words.push("Everybody is there.");
  if (now.bytes) words.push(`${size(now.bytes)} have travelled.`);
  if (now.gap !== null && now.gap !== undefined) words.push(`Relative gap ${fmt(now.gap, 2)}.`);
  set("now", title);
  set("then", words.join(" "));
  document.title = `${title} Fedkin watch`;
}

function set(id: string, words: string): void {
  const element = document.getElementById(id);
  if (element && element.textContent !== words) element.textContent = words;
}

function size(bytes: number): string {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let k = 0;
  let value = bytes;
  while (value >= 1000 && k < units.length - 1) {
    value /= 1000;
    k++;
  }
  return `${k ? value.toPrecision(3) : value} ${units[k]}`;
}

function row(site: Site): HTMLElement {
  const dot = el("span", { class: "swatch", "aria-hidden": true });
  dot.style.background = colour(COLOURS[site.kind]);
  const state =
    site.kind === "running" || site.kind === "elsewhere" || site.state === site.kind
      ? site.state
      : `${WORDS[site.kind]} (${site.state})`;
  return el(
    "tr",
    { "data-name": site.name, "data-kind": site.kind },
    el("th", { scope: "row" }, dot, site.name),
    el("td", {}, state, site.why ? el("small", {}, site.why) : null),
    el("td", { class: "number" }, site.round ?? "–"),
    el("td", { class: "number" }, fmt(site.change, 2)),
    el("td", { class: "number" }, site.sent ? size(site.sent) : "–"),
    el("td", { class: "number" }, site.restarts ?? "–"),
    el("td", {}, site.waiting_for.join(", ")),
  );
}

// --- the graph -------------------------------------------------------------------------------------------------

class Stage {
  readonly element: HTMLElement;
  private readonly canvas: HTMLCanvasElement;
  private context: CanvasRenderingContext2D | null = null;
  private width = 0;
  private key = "";
  private bodies: SimulationNodeDatum[] = [];
  private now: Watched | null = null;

  constructor() {
    this.canvas = el("canvas", {
      role: "img",
      "aria-label": "Graph of the sites; the table below has the same in words.",
    });
    const keys: Kind[] = ["running", "waiting", "absent", "trouble", "done"];
    const legend = el("ul", { class: "legend-groups" });
    const fill = (): void => {
      legend.replaceChildren(
        ...keys.map((kind) => {
          const dot = el("span", { class: "swatch", "aria-hidden": true });
          dot.style.background = colour(COLOURS[kind]);
          return el("li", {}, dot, WORDS[kind]);
        }),
      );
    };
    fill();
    onTheme(fill);
    this.element = el("figure", { class: "graph" }, legend, el("div", { class: "stage" }, this.canvas));
    new ResizeObserver(() => {
      const width = Math.min(this.element.clientWidth, 560);
      if (width > 0 && Math.abs(width - this.width) > 1) {
        this.width = width;
        this.context = resize(this.canvas, width, Math.round(0.78 * width));
        this.draw();
      }
    }).observe(this.element);
  }

  show(now: Watched): void {
    const key = JSON.stringify([now.sites.map((one) => one.name), now.edges]);
    if (key !== this.key) {
      this.key = key;
      this.place(now);
    }
    this.now = now;
    this.draw();
  }

  private place(now: Watched): void {
    const n = now.sites.length;
    this.bodies = now.sites.map((_, k) => ({ x: Math.cos((2 * Math.PI * k) / n), y: Math.sin((2 * Math.PI * k) / n) }));
    const links = now.edges.length <= 4000 ? now.edges.map(([source, target]) => ({ source, target })) : [];
    forceSimulation(this.bodies)
      .force("link", forceLink(links).distance(70))
      .force("charge", forceManyBody().strength(-240).distanceMax(500))
      .force("collide", forceCollide(24))
      .force("x", forceX(0).strength(0.05))
      .force("y", forceY(0).strength(0.08))
      .stop()
      .tick(n > 300 ? 80 : 240);
  }

  private draw(): void {
    const { context, now, width } = this;
    if (!context || !now || !this.bodies.length) return;
    const height = Math.round(0.78 * width);
    const [left, right] = extent(
      this.bodies.map((one) => one.x),
      0,
    );
    const [top, bottom] = extent(
      this.bodies.map((one) => one.y),
      0,
    );
    const pad = 46;
    const scale = Math.min(
      (width - 2 * pad) / Math.max(right - left, 1),
      (height - 2 * pad) / Math.max(bottom - top, 1),
      2.4,
    );
    const at = (k: number): [number, number] => [
      width / 2 + ((this.bodies[k].x ?? 0) - (left + right) / 2) * scale,
      height / 2 + ((this.bodies[k].y ?? 0) - (top + bottom) / 2) * scale,
    ];
    context.clearRect(0, 0, width, height);
    const number = new Map(now.sites.map((one, k) => [one.name, k]));
    const few = now.sites.length <= 60;
    const radius = few ? 15 : now.sites.length <= 300 ? 6 : 3;
    const gone = (k: number): boolean => now.sites[k].kind === "absent" || now.sites[k].kind === "left";
    for (const [a, b] of now.edges) {
      context.globalAlpha = gone(a) || gone(b) ? 0.25 : 0.6;
      context.strokeStyle = colour("muted");
      context.setLineDash(gone(a) || gone(b) ? [3, 4] : []);
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(...at(a));
      context.lineTo(...at(b));
      context.stroke();
    }
    context.globalAlpha = 1;
    context.setLineDash([]);
    for (const site of now.sites) {
      for (const other of site.waiting_for) {
        const [from, to] = [number.get(site.name), number.get(other)];
        if (from === undefined || to === undefined) continue;
        context.strokeStyle = colour("warn");
        context.lineWidth = 2.5;
        context.beginPath();
        context.moveTo(...at(from));
        context.lineTo(...at(to));
        context.stroke();
      }
    }
    now.sites.forEach((site, k) => {
      const [x, y] = at(k);
      context.globalAlpha = site.kind === "left" ? 0.4 : 1;
      context.fillStyle = colour("raised");
      context.beginPath();
      context.arc(x, y, radius + 4, 0, 2 * Math.PI);
      context.fill();
      context.fillStyle = colour(COLOURS[site.kind]);
      context.beginPath();
      context.arc(x, y, radius, 0, 2 * Math.PI);
      context.fill();
      if (few && site.round !== null && now.rounds > 0) {
        context.strokeStyle = colour(COLOURS[site.kind]);
        context.lineWidth = 3;
        context.beginPath();
        context.arc(x, y, radius + 4, -Math.PI / 2, -Math.PI / 2 + 2 * Math.PI * Math.min(site.round / now.rounds, 1));
        context.stroke();
      }
      if (few) {
        context.textAlign = "center";
        context.textBaseline = "middle";
        context.font = "600 13px system-ui, sans-serif";
        context.lineWidth = 4;
        context.strokeStyle = colour("raised");
        context.fillStyle = colour("ink");
        const words = site.name.length > 18 ? `${site.name.slice(0, 17)}…` : site.name;
        context.strokeText(words, x, y + radius + 15);
        context.fillText(words, x, y + radius + 15);
      }
      context.globalAlpha = 1;
    });
  }
}

// --- curves ----------------------------------------------------------------------------------------------------

function progress(now: Watched): HTMLElement[] {
  const out: HTMLElement[] = [];
  const trace = now.trace ?? {};
  const rounds = (trace.n_iter ?? []).map((value) => value ?? 0);
  const named: [string, (number | null)[]][] = [];
  if (trace.primal_residual?.length) named.push(["between neighbours", trace.primal_residual]);
  if (trace.dual_residual?.length) named.push(["at sites", trace.dual_residual]);
  if (named.length) out.push(curves("Residuals", "round", rounds, named, true));
  out.push(certificate(now, rounds));
  if (now.kind === "run") {
    if (trace.bytes)
      out.push(curves("Megabytes that travelled", "round", rounds, [["bytes", trace.bytes.map(mega)]], false));
    return out;
  }
  const start = now.series.time[0] ?? now.time;
  const seconds = now.series.time.map((value) => value - start);
  if (!named.length) {
    const title = "Largest change of a parameter in the last round";
    out.push(curves(title, "seconds", seconds, [["change", now.series.change]], true));
  }
  out.push(
    curves("Rounds of the site that is furthest behind", "seconds", seconds, [["round", now.series.round]], false),
  );
  if (now.series.bytes.some((value) => value)) {
    out.push(
      curves("Megabytes that sites have sent", "seconds", seconds, [["bytes", now.series.bytes.map(mega)]], false),
    );
  }
  return out;
}

const SUMMED =
  "The sum of what every site works out for itself, for the parameters of that round. Where rounds look at some rows only, it jumps; the average that sites return is steadier.";

/** The gap along the rounds, or why there is none. */
function certificate(now: Watched, rounds: number[]): HTMLElement {
  const gap = now.trace?.gap ?? [];
  const title = "Certificate: relative gap";
  if (!now.no_gap && gap.some((value) => value !== null)) {
    const figure = curves(title, "round", rounds, [["gap", gap]], true);
    if (now.kind === "sites") figure.append(el("figcaption", {}, SUMMED));
    return figure;
  }
  const words = now.no_gap ?? "None is asked for: fed_admm certifies its rounds when it is given a tolerance.";
  return el("figure", { class: "none" }, el("h3", {}, title), el("p", { class: "hint" }, words));
}

const mega = (value: number | null): number | null => (value === null ? null : value / 1e6);

function curves(
  title: string,
  unit: string,
  at: number[],
  named: [string, (number | null)[]][],
  log: boolean,
): HTMLElement {
  const [width, height] = [room(520), 240];
  const good = (value: number | null | undefined): value is number =>
    value !== null && value !== undefined && Number.isFinite(value) && (!log || value > 0);
  const values = named.flatMap(([, all]) => all.filter(good));
  const chart = picture(width, height, `${title}: now ${fmt(values[values.length - 1])}`);
  const [left, right, top, bottom] = [62, width - 10, 34, height - 42];
  const x = scaleLinear().domain(extent(at, 0)).range([left, right]);
  if (!values.length) {
    chart.append(svg("text", { x: left, y: height / 2 }, "nothing to draw yet"));
    return el("figure", {}, el("h3", {}, title), chart);
  }
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const y = log
    ? scaleLog()
        .domain([low / 1.2, high * 1.2])
        .range([bottom, top])
    : scaleLinear()
        .domain([0, high || 1])
        .nice(4)
        .range([bottom, top]);
  chart.append(bottomAxis(x, top, bottom, unit, 5), leftAxis(y, left, right, "", 3));
  named.forEach(([name, all], k) => {
    const points = at
      .map((value, j) => ({ at: value, value: all[j] }))
      .filter((one): one is { at: number; value: number } => good(one.value));
    const path = line<{ at: number; value: number }>()
      .x((one) => x(one.at))
      .y((one) => y(one.value));
    chart.append(svg("path", { d: path(points) ?? "", class: k ? "curve second" : "curve" }));
    if (named.length > 1) {
      const start = left + 170 * k;
      chart.append(
        svg("line", { x1: start, x2: start + 18, y1: 10, y2: 10, class: k ? "curve second" : "curve" }),
        svg("text", { x: start + 24, y: 14 }, name),
      );
    }
  });
  return el("figure", {}, el("h3", {}, title), chart);
}
