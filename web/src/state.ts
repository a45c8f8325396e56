// The hovered and the chosen site, shared by graph, matrix and tables. The address keeps the choice.
import type { Model } from "./data";

export interface Focus {
  hovered: number | null;
  chosen: number | null;
  /** A group, if no site is chosen. */
  group: number | null;
}

export class State {
  private focus: Focus = { hovered: null, chosen: null, group: null };
  private readonly listeners: ((focus: Focus) => void)[] = [];

  constructor(private readonly model: Model) {}

  get now(): Focus {
    return this.focus;
  }

  listen(listener: (focus: Focus) => void): void {
    this.listeners.push(listener);
  }

  hover(site: number | null): void {
    if (site !== this.focus.hovered) this.set({ ...this.focus, hovered: site });
  }

  /** Choose a site; the same one again, or null, chooses none. */
  choose(site: number | null): void {
    this.set({ ...this.focus, chosen: site === this.focus.chosen ? null : site, group: null });
    this.keep();
  }

  chooseGroup(group: number): void {
    this.set({ ...this.focus, chosen: null, group: group === this.focus.group ? null : group });
    this.keep();
  }

  /** Choose the site or group in the address: #site=23 or #group=2. */
  restore(): void {
    const [key, value] = decodeURIComponent(window.location.hash.slice(1)).split(/=(.*)/s);
    const site = key === "site" ? this.model.names.indexOf(value) : -1;
    const group = key === "group" ? Number(value) - 1 : -1;
    if (site >= 0) this.choose(site);
    else if (this.model.payload.resolved && this.model.members[group]) this.chooseGroup(group);
  }

  private keep(): void {
    const { chosen, group } = this.focus;
    const words =
      chosen !== null
        ? `#site=${encodeURIComponent(this.model.names[chosen])}`
        : group !== null
          ? `#group=${group + 1}`
          : "";
    window.history.replaceState(null, "", words || window.location.pathname + window.location.search);
  }

  private set(focus: Focus): void {
    this.focus = focus;
    for (const listener of this.listeners) listener(focus);
  }
}
