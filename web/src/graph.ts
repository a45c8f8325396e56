// Sites as dots, coloured by group: a graph, or a map. Hovering and clicking update the other views.
import { onWidth, resize } from "./chart";
import type { Model } from "./data";
import { choice, el, plural, short } from "./dom";
import { graphLayout, type Layout, MOST_SITES, mapLayout } from "./layout";
import type { State } from "./state";
import { colour, groupColour, groupShape, onLook, shade } from "./theme";

export type View = "graph" | "map";

/** Above this many sites names are shown one at a time. */
const MOST_NAMES = 80;

type Box = [number, number, number, number];
const around = (x: number, y: number, wide: number, high: number): Box => [x - wide, y - high, x + wide, y + high];
const overlap = (a: Box, b: Box): boolean => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];

export class Graph {
  readonly element: HTMLElement;
  private readonly canvas: HTMLCanvasElement;
  private readonly said = el("p", { class: "said", "aria-live": "polite" });
  private context!: CanvasRenderingContext2D;
  private layouts: Partial<Record<View, Layout>> = {};
  private view: View;
  private size = 0;
  private opened = new Set<number>();
  private showKept = true;
  private showDropped = false;

  constructor(
    private readonly model: Model,
    private readonly state: State,
    most = 560,
    private readonly bare = false,
  ) {
    const { payload } = model;
    this.view = payload.places ? "map" : "graph";
    if (bare) this.opened = new Set(model.members.keys());
    this.canvas = el("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label": `Graph of ${plural(model.n, "site")}, coloured by group. Arrow keys move from site to site, Enter chooses one.`,
    });
    this.canvas.addEventListener("mousemove", (event) => this.onMove(event));
    this.canvas.addEventListener("mouseleave", () => state.hover(null));
    this.canvas.addEventListener("click", (event) => this.onClick(event));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    if (bare) for (const name of ["tabindex", "role", "aria-label"]) this.canvas.removeAttribute(name);
    const stage = el("div", { class: "stage" }, this.canvas);
    this.element = bare
      ? el("div", { class: "hero", "aria-hidden": true }, stage)
      : el("figure", { class: "graph" }, this.controls(), stage, this.said);
    state.listen(() => this.draw());
    onLook(() => this.draw());
    onWidth(this.element, most + (bare ? 0 : 28), (width) => {
      this.size = width - (bare ? 0 : 28);
      this.context = resize(this.canvas, this.size, this.height);
      this.draw();
    });
  }

  private get many(): boolean {
    return this.model.n > MOST_SITES;
  }

  private get layout(): Layout {
    const { places } = this.model.payload;
    const made =
      this.layouts[this.view] ??
      (this.view === "map" && places?.kind === "points" ? mapLayout(this.model, places) : graphLayout(this.model));
    this.layouts[this.view] = made;
    return made;
  }

  private get tiles(): boolean {
    return this.view === "map" && this.model.payload.places?.kind === "tiles";
  }

  private controls(): HTMLElement {
    const { edges, places } = this.model.payload;
    const box = (words: string, on: boolean, change: (on: boolean) => void): HTMLElement => {
      const input = el("input", { type: "checkbox", checked: on });
      input.addEventListener("change", () => {
        change(input.checked);
        this.draw();
      });
      return el("label", { class: "check" }, input, words);
    };
    const bar = el("div", { class: "bar" });
    if (places) {
      bar.append(
        choice<View>(
          "Picture",
          [
            ["Map", "map"],
            ["Graph", "graph"],
          ],
          this.view,
          (view) => {
            this.view = view;
            this.draw();
          },
        ),
      );
    }
    if (!this.model.payload.resolved && this.model.n > 2) {
      bar.append(
        el(
          "span",
          { class: "ramp unlike" },
          "like the mean",
          el("span", { class: "gradient", "aria-hidden": true }),
          "unlike",
        ),
      );
    }
    if (edges.complete && edges.n_kept) {
      const words =
        edges.what === "likely" ? `${plural(edges.n_kept, "likely pair")}` : `${plural(edges.n_kept, "kept edge")}`;
      bar.append(
        box(words, true, (on) => {
          this.showKept = on;
        }),
      );
    }
    if (this.model.dropped) {
      bar.append(
        box(plural(this.model.dropped.length / 2, "dropped edge"), false, (on) => {
          this.showDropped = on;
        }),
      );
    }
    if (this.many && this.model.payload.resolved) {
      bar.append(
        box("show sites", false, (on) => {
          this.opened = new Set(on ? this.model.members.keys() : []);
        }),
      );
    }
    return bar;
  }

  private get height(): number {
    return this.size;
  }

  private tileBox(code: string): [number, number, number] | null {
    const places = this.model.payload.places;
    if (places?.kind !== "tiles") return null;
    const tile = places.tiles.find((one) => one[0] === code);
    const unit = this.size / 11;
    return tile ? [tile[1] * unit, (tile[2] + 1.4) * unit, unit - 3] : null;
  }

  private closed(group: number): boolean {
    return this.many && this.model.payload.resolved && this.view === "graph" && !this.opened.has(group);
  }

  draw(): void {
    if (!this.context) return;
    const { context, size, model } = this;
    context.clearRect(0, 0, size, this.height);
    if (this.tiles) this.drawTiles();
    else this.drawDots();
    const { hovered, chosen } = this.state.now;
    const site = hovered ?? chosen;
    this.said.textContent =
      site === null
        ? "Point at a site, or click to choose it."
        : `${model.names[site]}: ${model.groupName(model.groups[site])}, ${plural(model.payload.sites.rows[site], "row")}`;
  }

  /** A site's colour: that of its group; without groups, by distance from the mean of all sites. */
  private tint(site: number): string {
    const { unlike } = this.model.payload.coefficients;
    return unlike ? shade(unlike[site]) : groupColour(this.model.groups[site]);
  }

  /** How strongly a site is drawn, from 0 to 1, next to the site or group in focus. */
  private emphasis(site: number): number {
    const { groups, payload } = this.model;
    const { hovered, chosen, group } = this.state.now;
    const focus = hovered ?? chosen;
    if (focus === null) return group === null || groups[site] === group ? 1 : 0.3;
    const alike = payload.resolved ? null : this.model.share(focus, site);
    if (alike === null) return groups[site] === groups[focus] ? 1 : 0.3;
    return 0.25 + 0.75 * alike;
  }

  private drawTiles(): void {
    const { context, model } = this;
    const places = model.payload.places;
    if (places?.kind !== "tiles") return;
    const { hovered, chosen } = this.state.now;
    const site = new Map(places.codes.map((code, k) => [code, k]));
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const [code] of places.tiles) {
      const [x, y, side] = this.tileBox(code) ?? [0, 0, 0];
      const member = site.get(code);
      context.globalAlpha = member === undefined ? 1 : this.emphasis(member);
      context.fillStyle = member === undefined ? colour("faint") : this.tint(member);
      context.beginPath();
      context.roundRect(x, y, side, side, 5);
      context.fill();
      context.globalAlpha = 1;
      if (member !== undefined && (member === hovered || member === chosen)) {
        context.strokeStyle = colour("ink");
        context.lineWidth = 2.5;
        context.stroke();
      }
      context.font = `600 ${Math.max(side * 0.3, 9)}px system-ui, sans-serif`;
      const light = member !== undefined && (model.payload.coefficients.unlike?.[member] ?? 1) < 0.45;
      context.fillStyle = member === undefined ? colour("muted") : colour(light ? "ink" : "paper");
      context.fillText(code, x + side / 2, y + side / 2 + 1);
    }
  }

  private drawDots(): void {
    const { context, model, size } = this;
    const layout = this.layout;
    const { hovered, chosen } = this.state.now;
    const focus = hovered ?? chosen;
    const at = (site: number): [number, number] => [layout.x[site] * size, layout.y[site] * size];
    const lines = (ends: Int32Array, only: number | null): void => {
      context.beginPath();
      for (let e = 0; e < ends.length; e += 2) {
        const [a, b] = [ends[e], ends[e + 1]];
        if (only !== null && a !== only && b !== only) continue;
        if (this.closed(model.groups[a]) || this.closed(model.groups[b])) continue;
        context.moveTo(...at(a));
        context.lineTo(...at(b));
      }
      context.stroke();
    };
    context.lineWidth = 1;
    if (this.showDropped && model.dropped) {
      context.strokeStyle = colour("loss");
      context.setLineDash([3, 3]);
      context.globalAlpha = model.dropped.length > 2000 ? 0.18 : 0.5;
      lines(model.dropped, null);
      context.setLineDash([]);
    }
    if (this.showKept) {
      context.strokeStyle = colour("muted");
      context.globalAlpha = model.kept.length > 4000 ? 0.12 : model.kept.length > 600 ? 0.2 : 0.4;
      lines(model.kept, null);
      if (focus !== null) {
        context.globalAlpha = 0.9;
        context.strokeStyle = groupColour(model.groups[focus], model.payload.resolved);
        lines(model.kept, focus);
      }
    }
    context.globalAlpha = 1;
    if (layout.discs && model.payload.resolved) this.drawDiscs(layout);
    for (let site = 0; site < model.n; site++) {
      if (this.closed(model.groups[site])) continue;
      const [x, y] = at(site);
      context.globalAlpha = this.emphasis(site);
      context.fillStyle = this.tint(site);
      this.mark(site, x, y, layout.dot, layout.dot > 2.5 ? colour("paper") : null, 1.5);
    }
    context.globalAlpha = 1;
    for (const site of [chosen, hovered]) {
      if (site === null) continue;
      const [x, y] = at(site);
      context.fillStyle = this.tint(site);
      this.mark(site, x, y, Math.max(layout.dot, 4) + 2, colour("ink"), 2.5);
      this.label(model.names[site], x, y - layout.dot - 10);
    }
    if (focus === null && model.n <= MOST_NAMES && !this.bare) this.drawNames(layout.dot, at);
  }

  /** Draw the mark of a site's group. */
  private mark(site: number, x: number, y: number, r: number, outline: string | null, width: number): void {
    const { context, model } = this;
    const shape = new Path2D(groupShape(model.groups[site], r, model.payload.resolved));
    context.save();
    context.translate(x, y);
    context.fill(shape);
    if (outline) {
      context.lineWidth = width;
      context.strokeStyle = outline;
      context.stroke(shape);
    }
    context.restore();
  }

  /** Draw names of sites that do not overlap with other names or sites. */
  private drawNames(dot: number, at: (site: number) => [number, number]): void {
    const { context, model, size } = this;
    context.font = "11px system-ui, sans-serif";
    const taken: Box[] = model.names.map((_, site) => around(...at(site), dot, dot));
    for (let site = 0; site < model.n; site++) {
      const [x, y] = at(site);
      const half = context.measureText(short(model.names[site], 28)).width / 2 + 2;
      const places: [number, number][] = [
        [x, y - dot - 8],
        [x, y + dot + 9],
        [x + dot + half + 2, y],
        [x - dot - half - 2, y],
      ];
      const place = places.find(([left, top]) => {
        const box = around(left, top, half, 6);
        const inside = box[0] >= 0 && box[1] >= 0 && box[2] <= size && box[3] <= size;
        return inside && !taken.some((other) => overlap(box, other));
      });
      if (!place) continue;
      taken.push(around(...place, half, 6));
      this.label(model.names[site], ...place, true);
    }
  }

  private label(words: string, x: number, y: number, small = false): void {
    const { context, size } = this;
    const shown = short(words, 28);
    context.font = `${small ? "" : "600 "}${small ? 11 : 13}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const half = context.measureText(shown).width / 2 + 3;
    const place = Math.min(Math.max(x, half), size - half);
    context.lineWidth = 3.5;
    context.strokeStyle = colour("paper");
    context.strokeText(shown, place, Math.max(y, 8));
    context.fillStyle = small ? colour("muted") : colour("ink");
    context.fillText(shown, place, Math.max(y, 8));
  }

  private drawDiscs(layout: Layout): void {
    const { context, model, size } = this;
    layout.discs?.forEach((disc, group) => {
      const closed = this.closed(group);
      context.globalAlpha = closed ? 0.85 : 0.1;
      context.fillStyle = groupColour(group);
      context.beginPath();
      context.arc(disc.x * size, disc.y * size, disc.r * size, 0, 2 * Math.PI);
      context.fill();
      context.globalAlpha = 1;
      if (closed && disc.r * size > 16) {
        context.fillStyle = colour("paper");
        context.textAlign = "center";
        context.textBaseline = "middle";
        const [x, y, high] = [disc.x * size, disc.y * size, Math.min(Math.max(disc.r * size * 0.3, 11), 22)];
        const roomy = disc.r * size > 34;
        context.font = `600 ${high}px system-ui, sans-serif`;
        context.fillText(roomy ? model.groupName(group) : `${group + 1}`, x, roomy ? y - 0.55 * high : y);
        context.font = `${0.8 * high}px system-ui, sans-serif`;
        if (roomy) context.fillText(plural(model.members[group].length, "site"), x, y + 0.65 * high);
      }
    });
  }

  /** The site or closed group under the pointer. */
  private under(event: MouseEvent): { site: number | null; group: number | null } {
    const frame = this.canvas.getBoundingClientRect();
    const x = event.clientX - frame.left;
    const y = event.clientY - frame.top;
    if (this.tiles) {
      const places = this.model.payload.places;
      const codes = places?.kind === "tiles" ? places.codes : [];
      const site = codes.findIndex((code) => {
        const box = this.tileBox(code);
        return box && x >= box[0] && x <= box[0] + box[2] && y >= box[1] && y <= box[1] + box[2];
      });
      return { site: site < 0 ? null : site, group: null };
    }
    const layout = this.layout;
    let best = 14 * 14;
    let found: number | null = null;
    for (let site = 0; site < this.model.n; site++) {
      if (this.closed(this.model.groups[site])) continue;
      const dx = layout.x[site] * this.size - x;
      const dy = layout.y[site] * this.size - y;
      const away = dx * dx + dy * dy;
      if (away < best) {
        best = away;
        found = site;
      }
    }
    let group: number | null = null;
    layout.discs?.forEach((disc, k) => {
      const away = Math.hypot(disc.x * this.size - x, disc.y * this.size - y);
      if (away <= disc.r * this.size && this.closed(k)) group = k;
    });
    return { site: found, group };
  }

  private onMove(event: MouseEvent): void {
    const { site, group } = this.under(event);
    this.canvas.style.cursor = site !== null || group !== null ? "pointer" : "default";
    this.state.hover(site);
    if (site === null && group !== null) {
      const size = plural(this.model.members[group].length, "site");
      this.said.textContent = `${this.model.groupName(group)}: ${size}. Click to see them.`;
    }
  }

  private onClick(event: MouseEvent): void {
    const { site, group } = this.under(event);
    if (site !== null) this.state.choose(site);
    else if (group !== null) {
      this.opened.add(group);
      this.draw();
    }
  }

  private onKey(event: KeyboardEvent): void {
    const order = this.model.payload.order;
    const { hovered, chosen } = this.state.now;
    const from = hovered ?? chosen;
    const place = from === null ? -1 : this.model.rank[from];
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step !== undefined) {
      event.preventDefault();
      const site = order[(place + step + order.length) % order.length];
      this.opened.add(this.model.groups[site]);
      this.state.hover(site);
    } else if (event.key === "Enter" && from !== null) {
      event.preventDefault();
      this.state.choose(from);
    } else if (event.key === "Escape") {
      this.state.hover(null);
      if (chosen !== null) this.state.choose(null);
    }
  }
}
