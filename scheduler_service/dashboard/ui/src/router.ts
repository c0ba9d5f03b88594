/**
 * What is shown is in the address: `#/jobs/<job>/overview?…` and `#/jobs/<job>/iterations/<n>?…`.
 *
 * The part after `#` never reaches the server, so one index.html serves every view at any path prefix.
 */

import { useEffect, useState } from "preact/hooks";

export interface Route {
  page: "overview" | "iteration";
  job: string | null;
  /** null: the newest one with a plan. */
  iteration: number | null;
  options: ReadonlyMap<string, string>;
}

/** New values of options; null removes one. */
export type OptionChange = Record<string, string | number | null>;

export function parse(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  const options = new Map(new URLSearchParams(query));
  const job = parts[0] === "jobs" ? (parts[1] ?? null) : null;
  if (job !== null && parts[2] === "iterations") {
    const number = /^\d+$/.test(parts[3] ?? "") ? Number(parts[3]) : null;
    return { page: "iteration", job, iteration: number, options };
  }
  return { page: "overview", job, iteration: null, options };
}

export function href(route: Partial<Route> & Pick<Route, "page">): string {
  const query = new URLSearchParams([...(route.options ?? [])]).toString();
  const rest = route.page === "iteration" ? `iterations/${route.iteration ?? "latest"}` : "overview";
  const path = route.job ? `#/jobs/${encodeURIComponent(route.job)}/${rest}` : "#/";
  return query ? `${path}?${query}` : path;
}

export function withOptions(route: Route, change: OptionChange): Route {
  const options = new Map(route.options);
  for (const [name, value] of Object.entries(change)) {
    if (value === null || value === "") options.delete(name);
    else options.set(name, String(value));
  }
  return { ...route, options };
}

/** Goes to a view. `replace` adds no entry to the history: for options of the view that is shown. */
export function go(route: Partial<Route> & Pick<Route, "page">, { replace = false } = {}): void {
  const target = href(route);
  if (!replace) {
    window.location.hash = target;
    return;
  }
  window.history.replaceState(null, "", target);
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useRoute(): Route {
  const [route, setRoute] = useState(() => parse(window.location.hash));
  useEffect(() => {
    const update = () => setRoute(parse(window.location.hash));
    window.addEventListener("hashchange", update);
    return () => window.removeEventListener("hashchange", update);
  }, []);
  return route;
}

/** A whole number from the options, or null. */
export function numberOption(route: Route, name: string): number | null {
  const text = route.options.get(name);
  return text !== undefined && /^\d+$/.test(text) ? Number(text) : null;
}
