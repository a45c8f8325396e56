// A federation while it runs: the state of each site, who waits for whom, progress and traffic.
import {
  forceCollide,
  forceLink,
  forceManyBody,
  forceSimulation,
  forceX,
  forceY,
  type SimulationNodeDatum,
} from "d3-force";
import { extent, onWidth, resize, room } from "./chart";
import { codeBlock } from "./closing";
import { el, fmt, plural, scroll, section, short, svg, table, whole } from "./dom";
import { lineChart } from "./lines";
import { colour, groupShape, onLook } from "./theme";

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
  sites: Site[];
  edges: [number, number][];
  round: number;
  rounds: number;
  change?: number | null;
  bytes?: number | null;
  gap?: number | null;
  /** The round from which the gap stays small. */
  converged?: number | null;
  /** The next step when all sites are done: sentences and a command. */
  closing?: { words: string; command: string } | null;
  /** Why there is no gap, if so. */
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
/** Outlines (`groupShape`), so that states differ without colour: circle, square, triangle, diamond. */
const SHAPES: Record<Kind, number> = { running: 0, waiting: 1, absent: 0, trouble: 2, done: 3, left: 0, elsewhere: 0 };

const hollow = (kind: Kind): boolean => kind === "absent" || kind === "left";

/** The mark of a state as a small picture to put before words. */
function stateMark(kind: Kind): SVGSVGElement {
  const ink = colour(COLOURS[kind]);
  const path = svg("path", {
    d: groupShape(SHAPES[kind], 4.6),
    fill: hollow(kind) ? "none" : ink,
    stroke: ink,
    "stroke-width": 1.4,
  });
  return svg("svg", { viewBox: "-6 -6 12 12", width: 12, height: 12, class: "swatch", "aria-hidden": true }, path);
}

const HEADS = ["Site", "State", "Round", "Change", "Sent", "Restarts", "Waits for"];

export function startWatch(main: HTMLElement, text: string): void {
  let now = JSON.parse(text) as Watched;
  const stage = new Stage();
  const charts = el("div", { class: "columns" });
  const rows = el("tbody");
  const news = el("ol", { class: "news", "aria-live": "polite" });
  const older = el("ol", { class: "news" });
  const fold = el("details", { class: "more" }, el("summary", {}, "Earlier news"), older);
  const link = el("p", { class: "said", role: "status" });
  main.replaceChildren(
    section(
      "sites",
      "Sites",
      "",
      el("div", { class: "columns" }, stage.element, el("div", {}, el("h3", {}, "News"), news, fold, link)),
      scroll("All sites", table("All sites", HEADS, rows, 2, 6)),
    ),
    section("progress", "Progress", "", charts),
  );
  const draw = (): void => {
    headline(now);
    stage.show(now);
    rows.replaceChildren(...now.sites.slice(0, 200).map(row));
    tell(now.news, news, older, fold);
    charts.replaceChildren(...progress(now));
  };
  draw();
  onLook(draw);
  const token = new URLSearchParams(window.location.search).get("token") ?? "";
  const source = new EventSource(`/events?token=${encodeURIComponent(token)}`);
  source.onmessage = (event: MessageEvent<string>) => {
    now = JSON.parse(event.data) as Watched;
    link.textContent = "";
    document.body.dataset.live = "yes";
    draw();
  };
  source.onerror = () => {
    link.textContent = "The connection to fedkin watch is lost. This page shows the last state it received.";
    document.body.dataset.live = "no";
  };
  document.body.dataset.ready = "yes";
}

const NEWEST = 3;

/** Show the newest lines, and fold earlier ones. */
function tell(news: Watched["news"], list: HTMLElement, older: HTMLElement, fold: HTMLElement): void {
  const key = news.length ? `${news.length} ${news[0].time} ${news[0].words}` : "none";
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  const lines = news.map((one) =>
    el("li", {}, el("time", {}, new Date(1000 * one.time).toLocaleTimeString("en-GB")), one.words),
  );
  if (!lines.length) lines.push(el("li", { class: "hint" }, "No events since this page was opened."));
  list.replaceChildren(...lines.slice(0, NEWEST));
  older.replaceChildren(...lines.slice(NEWEST));
  fold.hidden = lines.length <= NEWEST;
}

/** Seconds since the last round of the slowest site. */
function still(now: Watched): number {
  const { time, round } = now.series;
  return now.time - time[round.indexOf(now.round)];
}

/** Rounds per second over the last half minute of the series; null where that is not known, or nothing moves. */
function rate(now: Watched): number | null {
  const { time, round } = now.series;
  const last = time.length - 1;
  const first = time.findIndex((one) => one >= time[last] - 30);
  const seconds = time[last] - time[first];
  const moves = still(now) < QUIET && round[last] > round[first] && seconds >= 2;
  return moves ? (round[last] - round[first]) / seconds : null;
}

/** After this many seconds without a round the page says so. */
const QUIET = 6;

/** Smaller gaps are rounding. */
const ROUNDING = 1e-12;

const gapWords = (gap?: number | null): string => ((gap ?? 1) < ROUNDING ? "below 1e−12" : fmt(gap, 2));

function duration(seconds: number): string {
  if (seconds < 90) return `${Math.max(Math.round(seconds), 1)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function headline(now: Watched): void {
  const count = (kind: Kind): number => now.sites.filter((one) => one.kind === kind).length;
  const there = now.sites.filter((one) => one.kind !== "left");
  const absent = now.sites.filter((one) => one.kind === "absent");
  const trouble = now.sites.filter((one) => one.kind === "trouble");
  const done = there.length > 0 && count("done") === there.length;
  let title = "Waiting for the run.";
  const stopped = absent.length > 0 && absent.length === there.length;
  const progressed = document.getElementById("bar");
  if (progressed) progressed.style.width = `${(100 * now.round) / Math.max(now.rounds, 1)}%`;
  if (done) title = there.length === 1 ? "The site is done." : `All ${plural(there.length, "site")} are done.`;
  else if (now.round > 0 || now.rounds > 0)
    title = `${stopped && now.round ? "Stopped at round" : "Round"} ${whole(now.round)} of ${whole(now.rounds)}.`;
  else if (there.length) title = `${plural(there.length, "site")}, not started yet.`;
  const words: string[] = [];
  const some = (sites: Site[]): string =>
    sites.length > 4 ? plural(sites.length, "site") : sites.map((one) => one.name).join(", ");
  const speed = rate(now);
  if (!done && speed !== null) {
    const left = (now.rounds - now.round) / speed;
    words.push(`${fmt(speed, 2)} rounds per second, about ${duration(left)} left.`);
  }
  if (!done && now.round > 0 && still(now) >= QUIET) words.push(`No round for ${duration(still(now))}.`);
  if (now.converged) words.push(`Converged at about round ${whole(now.converged)}: relative gap ${gapWords(now.gap)}.`);
  else if (now.gap !== null && now.gap !== undefined)
    words.push(`${done ? "Not converged" : "Not converged yet"}: relative gap ${fmt(now.gap, 2)}.`);
  if (trouble.length) words.push(`${some(trouble)} ${trouble.length === 1 ? "needs" : "need"} help.`);
  if (stopped) words.push("No site is running; the command that started the run continues it.");
  else if (absent.length && !done) words.push(`${some(absent)} ${absent.length === 1 ? "is" : "are"} absent.`);
  const waiting = count("waiting");
  if (waiting) words.push(`${plural(waiting, "site")} ${waiting === 1 ? "waits" : "wait"} for others.`);
  const left = now.sites.filter((one) => one.kind === "left");
  if (left.length) words.push(`${some(left)} ${left.length === 1 ? "has" : "have"} left permanently.`);
  if (there.length && !done && !trouble.length && !absent.length && !waiting) words.push("All sites are connected.");
  if (now.bytes) words.push(`${size(now.bytes)} sent.`);
  if (!there.length) words.push("Sites appear here as soon as they exist.");
  set("now", title);
  set("then", words.join(" "));
  const closing = document.getElementById("closing");
  if (closing) {
    const { words = "", command = "" } = now.closing ?? {};
    closing.hidden = !now.closing;
    if (now.closing && closing.dataset.command !== command) {
      closing.dataset.command = command;
      closing.replaceChildren(el("p", {}, `${words} Next:`), codeBlock(command));
    }
  }
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
  const state =
    site.kind === "running" || site.kind === "elsewhere" || site.state === site.kind
      ? site.state
      : `${WORDS[site.kind]} (${site.state})`;
  return el(
    "tr",
    { "data-name": site.name, "data-kind": site.kind },
    el("th", { scope: "row" }, stateMark(site.kind), site.name),
    el("td", {}, state, site.why ? el("small", {}, site.why) : null),
    el("td", { class: "number" }, site.round === null ? "–" : whole(site.round)),
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
      "aria-label": "Graph of the sites. The table below shows the same facts.",
    });
    const keys: Kind[] = ["running", "waiting", "absent", "trouble", "done"];
    const legend = el("ul", { class: "legend-groups" });
    const fill = (): void => {
      legend.replaceChildren(...keys.map((kind) => el("li", {}, stateMark(kind), WORDS[kind])));
    };
    fill();
    onLook(fill);
    this.element = el("figure", { class: "graph" }, legend, el("div", { class: "stage" }, this.canvas));
    onWidth(this.element, 560, (width) => {
      this.width = width;
      this.context = resize(this.canvas, width, Math.round(0.78 * width));
      this.draw();
    });
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
      const shape = new Path2D(groupShape(SHAPES[site.kind], radius));
      context.translate(x, y);
      context.fillStyle = context.strokeStyle = colour(COLOURS[site.kind]);
      context.lineWidth = 2;
      if (hollow(site.kind)) context.stroke(shape);
      else context.fill(shape);
      context.translate(-x, -y);
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
        const words = short(site.name, 18);
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
  const start = now.series.time[0] ?? now.time;
  const seconds = now.series.time.map((value) => value - start);
  if (!named.length) {
    const title = "Largest change of a parameter in the last round";
    out.push(curves(title, SECONDS, seconds, [["change", now.series.change]], true));
  }
  out.push(curves("Round of the slowest site", SECONDS, seconds, [["round", now.series.round]], false));
  if (now.series.bytes.some((value) => value)) {
    out.push(curves("Megabytes sent", SECONDS, seconds, [["bytes", now.series.bytes.map(mega)]], false));
  }
  return out;
}

const SECONDS = "seconds since this page was opened";
const SUMMED =
  "The gap is a sum over sites at the parameters of each round. It is noisy where rounds use samples of rows; the averaged parameters that sites return are steadier.";

/** The gap along the rounds, or why there is none. */
function certificate(now: Watched, rounds: number[]): HTMLElement {
  const gap = now.trace?.gap ?? [];
  const title = "Certificate: relative gap";
  if (!now.no_gap && gap.some((value) => value !== null)) {
    const shown = gap.map((value) => value && Math.max(value, ROUNDING));
    const figure = curves(title, "round", rounds, [["gap", shown]], true);
    figure.append(el("figcaption", {}, SUMMED));
    return figure;
  }
  const words = now.no_gap ?? "No round is complete yet.";
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
  const values = named.flatMap(([, all]) => all).filter((one): one is number => one !== null && (!log || one > 0));
  if (!values.length) return el("figure", {}, el("h3", {}, title), el("p", { class: "hint" }, "No values yet."));
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const { chart } = lineChart(
    named.map(([name, mean]) => ({ name, at, mean })),
    {
      label: `${title}: now ${fmt(values[values.length - 1])}`,
      size: [room(520), named.length > 1 ? 264 : 240],
      x: { domain: [0, Math.max(...at, 1)], title: unit },
      y: { domain: log ? [low / 1.2, high * 1.2] : [0, 1.05 * (high || 1)], title: "", log },
    },
  );
  return el("figure", {}, el("h3", {}, title), chart);
}
