// What is hovered and what is chosen, shared by graph, matrix and tables.

export interface Focus {
  hovered: number | null;
  chosen: number | null;
}

export class State {
  private focus: Focus = { hovered: null, chosen: null };
  private readonly listeners: ((focus: Focus) => void)[] = [];

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
    this.set({ ...this.focus, chosen: site === this.focus.chosen ? null : site });
  }

  private set(focus: Focus): void {
    this.focus = focus;
    for (const listener of this.listeners) listener(focus);
  }
}
