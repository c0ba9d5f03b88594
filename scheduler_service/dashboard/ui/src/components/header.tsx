/** The bar at the top: pages, job, stream, whether the page is live, and the theme. */

import { useState } from "preact/hooks";
import { type Job, STREAMS, type Stream } from "../api";
import type { LiveStatus } from "../live";
import { go, href, type Route } from "../router";
import type { ThemeChoice } from "../theme";

interface HeaderProps {
  route: Route;
  jobs: readonly Job[];
  job: Job | null;
  stream: Stream;
  live: LiveStatus;
  theme: ThemeChoice;
  onTheme: (choice: ThemeChoice) => void;
}

const LIVE_WORDS: Record<LiveStatus, string> = { connecting: "Connecting", live: "Live", polling: "Reconnecting" };
const THEMES: Record<ThemeChoice, ThemeChoice> = { system: "light", light: "dark", dark: "system" };

export function Header({ route, jobs, job, stream, live, theme, onTheme }: HeaderProps) {
  const kept = new Map(stream === "train" ? [] : [["stream", stream] as const]);
  const page = (name: Route["page"], text: string) => (
    <a
      href={href({ page: name, job: job?.job ?? null, iteration: null, options: kept })}
      aria-current={route.page === name ? "page" : undefined}
    >
      {text}
    </a>
  );
  return (
    <header class="top">
      <a class="brand" href="#/" aria-label="HyDra-CP, start page">
        <img src="./favicon.svg" alt="" width="22" height="22" />
        HyDra-CP
      </a>
      <nav aria-label="Pages">
        {page("overview", "Overview")}
        {job && page("iteration", "Iteration")}
      </nav>
      <span class="spacer" />
      {jobs.length > 0 && (
        <label class="pick">
          <span>Job</span>
          <select value={job?.job ?? ""} onChange={(event) => go({ page: "overview", job: event.currentTarget.value, options: new Map() })}>
            {job === null && <option value="">choose…</option>}
            {jobs.map((each) => (
              <option key={each.job} value={each.job}>
                {each.job}
              </option>
            ))}
          </select>
        </label>
      )}
      {job && (
        <label class="pick">
          <span>Stream</span>
          <select
            value={stream}
            onChange={(event) => {
              const next = event.currentTarget.value;
              go({ page: route.page, job: job.job, iteration: null, options: new Map(next === "train" ? [] : [["stream", next]]) });
            }}
          >
            {STREAMS.map((name) => (
              <option key={name} value={name}>
                {name.replace("_", " ")}
              </option>
            ))}
          </select>
        </label>
      )}
      <span class={`live ${live}`} role="status" title={live === "polling" ? "No event stream; the page asks every five seconds" : undefined}>
        {LIVE_WORDS[live]}
      </span>
      <button type="button" class="quiet theme" onClick={() => onTheme(THEMES[theme])} aria-label={`Theme: ${theme}. Switch to ${THEMES[theme]}`}>
        <ThemeIcon theme={theme} />
        <span>{theme === "system" ? "Auto" : theme === "light" ? "Light" : "Dark"}</span>
      </button>
    </header>
  );
}

function ThemeIcon({ theme }: { theme: ThemeChoice }) {
  return (
    <svg viewBox="0 0 16 16" width="14" height="14" aria-hidden="true">
      <circle cx="8" cy="8" r="6" fill="none" stroke="currentColor" stroke-width="1.5" />
      {theme !== "light" && <path d={theme === "dark" ? "M8 2a6 6 0 1 1 0 12a6 6 0 1 1 0-12" : "M8 2a6 6 0 0 1 0 12z"} fill="currentColor" />}
    </svg>
  );
}

/** Copies the address of the view, which holds all that is chosen on it. */
export function CopyLink() {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(window.location.href);
      setDone(true);
      window.setTimeout(() => setDone(false), 2000);
    } catch {
      window.prompt("Address of this view", window.location.href); // no clipboard without HTTPS
    }
  };
  return (
    <button type="button" onClick={copy}>
      {done ? "Link copied" : "Copy link"}
    </button>
  );
}
