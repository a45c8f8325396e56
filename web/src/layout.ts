// Where sites are drawn: by the edges between them, in discs by group, or on a map. Coordinates lie between 0 and 1.
import {
  forceCollide,
  forceLink,
  forceManyBody,
  forceSimulation,
  forceX,
  forceY,
  type SimulationLinkDatum,
  type SimulationNodeDatum,
} from "d3-force";
import type { Model, Places } from "./data";

export interface Disc {
  x: number;
  y: number;
  r: number;
}

export interface Layout {
  x: Float64Array;
  y: Float64Array;
  /** Radius of a site's dot. */
  dot: number;
  discs: Disc[] | null;
}

/** Up to this many sites the layout follows edges; above, groups. */
export const MOST_SITES = 400;
const MOST_LINKS = 4000;
const GOLDEN = Math.PI * (3 - Math.sqrt(5));

interface Body extends SimulationNodeDatum {
  r: number;
}

export function graphLayout(model: Model): Layout {
  return model.n <= MOST_SITES ? forceLayout(model) : discLayout(model);
}

function layoutLinks(model: Model): SimulationLinkDatum<Body>[] {
  const links: SimulationLinkDatum<Body>[] = [];
  if (model.kept.length && model.kept.length / 2 <= MOST_LINKS) {
    for (let e = 0; e < model.kept.length; e += 2) links.push({ source: model.kept[e], target: model.kept[e + 1] });
  } else {
    for (let site = 0; site < model.n; site++) {
      for (const other of model.nearest(site, 4)) {
        if (other.share > 0.05) links.push({ source: site, target: other.site });
      }
    }
  }
  return links;
}

function forceLayout(model: Model): Layout {
  const start = discLayout(model);
  const bodies: Body[] = model.names.map((_, k) => ({ x: 600 * start.x[k], y: 600 * start.y[k], r: 7 }));
  const links = layoutLinks(model);
  const degree = new Float64Array(model.n);
  for (const { source, target } of links) {
    degree[source as number]++;
    degree[target as number]++;
  }
  const simulation = forceSimulation(bodies)
    .force(
      "link",
      forceLink(links)
        .distance(38)
        .strength((_, k) => {
          const link = links[k];
          const a = (link.source as Body).index ?? 0;
          const b = (link.target as Body).index ?? 0;
          const same = model.groups[a] === model.groups[b];
          return (same ? 1 : 0.15) / Math.max(Math.min(degree[a], degree[b]), 1);
        }),
    )
    .force("charge", forceManyBody().strength(-70).distanceMax(320))
    .force(
      "collide",
      forceCollide<Body>((body) => body.r + 3),
    )
    .force("x", forceX(300).strength(0.045))
    .force("y", forceY(300).strength(0.06))
    .stop();
  simulation.tick(model.n > 200 ? 160 : 260);
  return fitted(
    Float64Array.from(bodies, (body) => body.x ?? 0),
    Float64Array.from(bodies, (body) => body.y ?? 0),
    model.n > 150 ? 4 : model.n > 60 ? 5.5 : 8,
  );
}

/** Discs for groups, their sites inside like the seeds of a sunflower. */
export function discLayout(model: Model): Layout {
  const bodies: Body[] = model.members.map((members, k) => {
    const angle = k * GOLDEN;
    const away = 8 * Math.sqrt(k);
    return { x: away * Math.cos(angle), y: away * Math.sin(angle), r: 6 * Math.sqrt(members.length) + 2 };
  });
  forceSimulation(bodies)
    .force("collide", forceCollide<Body>((body) => body.r + 5).iterations(3))
    .force("x", forceX(0).strength(0.06))
    .force("y", forceY(0).strength(0.08))
    .stop()
    .tick(bodies.length > 300 ? 60 : 160);
  const x = new Float64Array(model.n);
  const y = new Float64Array(model.n);
  model.members.forEach((members, group) => {
    const body = bodies[group];
    members.forEach((site, k) => {
      const away = members.length === 1 ? 0 : 6 * Math.sqrt(k + 0.5) * 0.94;
      x[site] = (body.x ?? 0) + away * Math.cos(k * GOLDEN);
      y[site] = (body.y ?? 0) + away * Math.sin(k * GOLDEN);
    });
  });
  const left = Math.min(...bodies.map((body) => (body.x ?? 0) - body.r));
  const right = Math.max(...bodies.map((body) => (body.x ?? 0) + body.r));
  const top = Math.min(...bodies.map((body) => (body.y ?? 0) - body.r));
  const bottom = Math.max(...bodies.map((body) => (body.y ?? 0) + body.r));
  const size = Math.max(right - left, bottom - top, 1);
  const moveX = (size - (right - left)) / 2 - left;
  const moveY = (size - (bottom - top)) / 2 - top;
  return {
    x: x.map((value) => (value + moveX) / size),
    y: y.map((value) => (value + moveY) / size),
    dot: Math.min(Math.max((3.1 / size) * 520, 1.2), 9),
    discs: bodies.map((body) => ({
      x: ((body.x ?? 0) + moveX) / size,
      y: ((body.y ?? 0) + moveY) / size,
      r: body.r / size,
    })),
  };
}

function fitted(x: Float64Array, y: Float64Array, dot: number): Layout {
  const left = Math.min(...x);
  const top = Math.min(...y);
  const size = Math.max(Math.max(...x) - left, Math.max(...y) - top, 1e-9);
  const moveX = (size - (Math.max(...x) - left)) / 2 - left;
  const moveY = (size - (Math.max(...y) - top)) / 2 - top;
  return {
    x: x.map((value) => 0.05 + (0.9 * (value + moveX)) / size),
    y: y.map((value) => 0.05 + (0.9 * (value + moveY)) / size),
    dot,
    discs: null,
  };
}

/** Sites at their coordinates; a globe is drawn with the middle latitude true to scale. */
export function mapLayout(model: Model, places: Extract<Places, { kind: "points" }>): Layout {
  const middle = places.y.reduce((sum, value) => sum + value, 0) / Math.max(places.y.length, 1);
  const squeeze = places.globe ? Math.cos((middle * Math.PI) / 180) : 1;
  return fitted(
    Float64Array.from(places.x, (value) => value * squeeze),
    Float64Array.from(places.y, (value) => -value),
    model.n > 400 ? 2.5 : model.n > 100 ? 4 : 6.5,
  );
}
