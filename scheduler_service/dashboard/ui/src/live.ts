/**
 * Tells the pages when there is something new.
 *
 * Server-sent events while they arrive; every five seconds while they do not. A hidden tab listens to nothing, and
 * catches up when it is shown.
 */

import { useEffect, useState } from "preact/hooks";
import { endpoint } from "./api";

export type LiveStatus = "connecting" | "live" | "polling";

export interface Live {
  status: LiveStatus;
  /** Grows when data may have changed. */
  version: number;
}

const POLL_MS = 5000;
/** Events come in bursts (planned, executed, …); one fetch serves a burst. */
const SETTLE_MS = 300;
/** Also while live: figures such as "last seen" change without an event. */
const REFRESH_MS = 60000;
const RETRY_MS = [1000, 2000, 5000, 10000];

export function useLive(): Live {
  const [status, setStatus] = useState<LiveStatus>("connecting");
  const [version, setVersion] = useState(0);
  useEffect(() => {
    let source: EventSource | null = null;
    let retry: number | undefined;
    let settle: number | undefined;
    let failures = 0;
    let open = false;
    let lastFetch = Date.now();

    const changed = () => {
      settle ??= window.setTimeout(() => {
        settle = undefined;
        lastFetch = Date.now();
        setVersion((n) => n + 1);
      }, SETTLE_MS);
    };
    const disconnect = () => {
      source?.close();
      source = null;
      open = false;
      window.clearTimeout(retry);
    };
    const connect = () => {
      disconnect();
      const next = new EventSource(endpoint("events/stream"));
      source = next;
      next.onopen = () => {
        // What happened while there was no connection is fetched, not replayed.
        if (failures > 0) changed();
        failures = 0;
        open = true;
        setStatus("live");
      };
      next.onerror = () => {
        disconnect();
        setStatus("polling");
        retry = window.setTimeout(connect, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
        failures += 1;
      };
      next.onmessage = changed;
    };
    const visibility = () => {
      if (document.hidden) disconnect();
      else {
        connect();
        changed();
      }
    };
    const poll = window.setInterval(() => {
      if (!document.hidden && Date.now() - lastFetch >= (open ? REFRESH_MS : POLL_MS)) changed();
    }, 1000);

    if (!document.hidden) connect();
    document.addEventListener("visibilitychange", visibility);
    return () => {
      disconnect();
      window.clearTimeout(settle);
      window.clearInterval(poll);
      document.removeEventListener("visibilitychange", visibility);
    };
  }, []);
  return { status, version };
}
