// The ordered matrix: the probability that two sites are alike, or how many coefficients they share.
import { onWidth, resize } from "./chart";
import type { Model } from "./data";
import { el, plural, share as shareText } from "./dom";
import type { State } from "./state";
import { colour, groupColour, onLook, rgb } from "./theme";

const STRIP = 10;

export class Matrix {
  readonly element: HTMLElement;
  private readonly canvas: HTMLCanvasElement;
  private readonly said = el("p", { class: "said" });
  private context!: CanvasRenderingContext2D;
  private image: HTMLCanvasElement | null = null;
  private size = 0;

  constructor(
    private readonly model: Model,
    private readonly state: State,
  ) {
    const kin = model.payload.method === "kin";
    const what = kin ? "probability that two sites are alike" : "share of coefficients that are equal at two sites";
    this.canvas = el("canvas", {
      role: "img",
      "aria-label": `Matrix of ${plural(model.n, "site")} ordered by group: the darker a cell, the higher the ${what}.`,
    });
    this.canvas.addEventListener("mousemove", (event) => this.onMove(event));
    this.canvas.addEventListener("mouseleave", () => {
      state.hover(null);
      this.rest();
    });
    this.canvas.addEventListener("click", (event) => {
      const cell = this.under(event);
      if (cell) state.choose(this.siteOf(cell[0]));
    });
    const bar = el(
      "div",
      { class: "bar legend" },
      el("span", {}, kin ? "probability of being alike" : "share of equal coefficients"),
      el("span", { class: "ramp" }, "0", el("span", { class: "gradient", "aria-hidden": true }), "1"),
    );
    this.element = el("figure", { class: "matrix" }, bar, el("div", { class: "stage" }, this.canvas), this.said);
    state.listen(() => this.draw());
    onLook(() => {
      this.image = null;
      this.draw();
    });
    onWidth(this.element, 560, (width) => {
      this.size = width;
      this.context = resize(this.canvas, width, width);
      this.draw();
    });
    this.rest();
  }

  private rest(): void {
    const cells = this.model.cells;
    this.said.textContent =
      cells < this.model.n
        ? `A row stands for about ${Math.round(this.model.n / cells)} neighbouring sites.`
        : `A row and a column for each site, ${this.model.payload.resolved ? "ordered by group" : "similar sites next to each other"}.`;
  }

  private siteOf(cell: number): number {
    return this.model.payload.order[this.model.range(cell)[0]];
  }

  private pixels(): HTMLCanvasElement {
    if (this.image) return this.image;
    const { model } = this;
    const m = model.cells;
    const made = document.createElement("canvas");
    made.width = made.height = m;
    const context = made.getContext("2d")!;
    const data = context.createImageData(m, m);
    const [from, to] = [rgb(colour("cell-0")), rgb(colour("cell-1"))];
    for (let line = 0; line < m; line++) {
      for (let column = 0; column < m; column++) {
        const share = model.cell(line, column);
        const k = 4 * (line * m + column);
        for (let c = 0; c < 3; c++) data.data[k + c] = from[c] + (to[c] - from[c]) * share;
        data.data[k + 3] = 255;
      }
    }
    context.putImageData(data, 0, 0);
    this.image = made;
    return made;
  }

  draw(): void {
    if (!this.context) return;
    const { context, model, size } = this;
    const side = size - STRIP - 3;
    const start = STRIP + 3;
    context.clearRect(0, 0, size, size);
    context.imageSmoothingEnabled = model.cells > side;
    context.drawImage(this.pixels(), start, start, side, side);
    const unit = side / model.n;
    let from = 0;
    for (let place = 1; place <= model.n; place++) {
      const group = model.groups[model.payload.order[from]];
      if (place < model.n && model.groups[model.payload.order[place]] === group) continue;
      context.fillStyle = groupColour(group, model.payload.resolved);
      const gap = unit * (place - from) > 4 ? 1 : 0;
      context.fillRect(start + unit * from, 0, unit * (place - from) - gap, STRIP - 2);
      context.fillRect(0, start + unit * from, STRIP - 2, unit * (place - from) - gap);
      from = place;
    }
    const { hovered, chosen } = this.state.now;
    for (const [site, alpha] of [
      [chosen, 1],
      [hovered, 0.7],
    ] as const) {
      if (site === null) continue;
      const place = start + unit * model.rank[site];
      context.globalAlpha = alpha;
      context.strokeStyle = colour("ink");
      context.lineWidth = 1.5;
      const thick = Math.max(unit, 2);
      context.strokeRect(start, place, side - 1, thick);
      context.strokeRect(place, start, thick, side - 1);
      context.globalAlpha = 1;
    }
  }

  private under(event: MouseEvent): [number, number] | null {
    const frame = this.canvas.getBoundingClientRect();
    const side = this.size - STRIP - 3;
    const cells = this.model.cells;
    const at = (value: number): number => Math.floor(((value - STRIP - 3) / side) * cells);
    const line = at(event.clientY - frame.top);
    const column = at(event.clientX - frame.left);
    return line >= 0 && column >= 0 && line < cells && column < cells ? [line, column] : null;
  }

  private onMove(event: MouseEvent): void {
    const cell = this.under(event);
    this.canvas.style.cursor = cell ? "pointer" : "default";
    if (!cell) {
      this.state.hover(null);
      return;
    }
    const { model } = this;
    const site = this.siteOf(cell[0]);
    this.state.hover(site);
    const share = model.cell(cell[0], cell[1]);
    if (model.cells < model.n) {
      this.said.textContent = `Around ${model.names[site]} and ${model.names[this.siteOf(cell[1])]}: ${shareText(share)} on average`;
    } else {
      const other = this.siteOf(cell[1]);
      const what = model.payload.method === "kin" ? "alike with probability" : "share of equal coefficients:";
      this.said.textContent =
        site === other
          ? model.names[site]
          : `${model.names[site]} and ${model.names[other]}: ${what} ${shareText(share)}`;
    }
  }
}
