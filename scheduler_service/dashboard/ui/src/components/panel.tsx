/** The frame of each chart and table: title, note, its own controls, and what stands in for data that is not there. */

import type { ComponentChildren } from "preact";
import { ApiError } from "../api";
import { percent } from "../format";
import type { Resource } from "../resource";
import { go, withOptions } from "../router";
import { useView } from "./context";

interface PanelProps {
  /** Short name: anchor and the value in the `tables` option. */
  id: string;
  title: string;
  note?: ComponentChildren;
  controls?: ComponentChildren;
  className?: string;
  children: ComponentChildren;
}

export function Panel({ id, title, note, controls, className = "", children }: PanelProps) {
  return (
    <section class={`panel ${className}`} aria-labelledby={`${id}-title`} id={id}>
      <header class="panel-head">
        <div class="panel-words">
          <h2 id={`${id}-title`}>{title}</h2>
          {note && <p class="note">{note}</p>}
        </div>
        {controls && <div class="controls">{controls}</div>}
      </header>
      {children}
    </section>
  );
}

/** Whether the reader asked for the table of a panel, which the address keeps; and the button that switches. */
export function useTableToggle(id: string): [boolean, ComponentChildren] {
  const { route } = useView();
  const shown = new Set((route.options.get("tables") ?? "").split(".").filter(Boolean));
  const asTable = shown.has(id);
  const toggle = () => {
    if (asTable) shown.delete(id);
    else shown.add(id);
    go(withOptions(route, { tables: [...shown].join(".") }), { replace: true });
  };
  const button = (
    <button type="button" class="quiet" aria-pressed={asTable} onClick={toggle}>
      Table
    </button>
  );
  return [asTable, button];
}

/** `share` is how much of it has been fetched, while it is being fetched. */
export function CsvButton({ what, share = null, onClick }: { what: string; share?: number | null; onClick: () => void }) {
  return (
    <button type="button" class="quiet" aria-label={`Download ${what} as CSV`} disabled={share !== null} onClick={onClick}>
      {share === null ? "CSV" : `CSV ${percent(share, 0)}`}
    </button>
  );
}

interface SegmentsProps<T extends string> {
  label: string;
  value: T;
  choices: readonly (readonly [T, string])[];
  onChoose: (value: T) => void;
}

/** One of a few choices. */
export function Segments<T extends string>({ label, value, choices, onChoose }: SegmentsProps<T>) {
  return (
    <div class="segments" role="group" aria-label={label}>
      {choices.map(([name, text]) => (
        <button key={name} type="button" aria-pressed={name === value} onClick={() => onChoose(name)}>
          {text}
        </button>
      ))}
    </div>
  );
}

/** A message in the place of data: what is missing, and what to do. */
export function Message({ title, children, tone = "plain" }: { title: string; children?: ComponentChildren; tone?: "plain" | "bad" }) {
  return (
    <div class={`message ${tone}`} role={tone === "bad" ? "alert" : "status"}>
      <strong>{title}</strong>
      {children && <div>{children}</div>}
    </div>
  );
}

export function ErrorMessage({ error, retry }: { error: Error; retry: () => void }) {
  return (
    <Message title={error.message} tone="bad">
      {error instanceof ApiError && <code>{error.reason}</code>}{" "}
      <button type="button" onClick={retry}>
        Try again
      </button>
    </Message>
  );
}

interface LoadedProps<T> {
  resource: Resource<T>;
  height: number;
  children: (data: T) => ComponentChildren;
}

/** Data when it is there; otherwise why not. Old data stays, below the error that kept the new away. */
export function Loaded<T>({ resource, height, children }: LoadedProps<T>) {
  const { data, error, reload } = resource;
  if (data === null && error === null) {
    return <div class="skeleton" style={{ height: `${height}px` }} role="status" aria-label="Loading" />;
  }
  return (
    <>
      {error !== null && <ErrorMessage error={error} retry={reload} />}
      {data !== null && children(data)}
    </>
  );
}
