/** One iteration: where the load lies, how the pipeline runs, and why each sequence is where it is. */

import type { ComponentChildren } from "preact";
import { useMemo, useState } from "preact/hooks";
import {
  endpoint,
  get,
  type IterationPage as IterationList,
  type IterationSummary,
  type Job,
  jobPath,
  type LoadMap,
  type PlacedSequence,
  type PlanPage,
  type Stream,
  type Timeline,
} from "../api";
import { useView } from "../components/context";
import { Figures } from "../components/figures";
import { CopyLink } from "../components/header";
import { type GroupAddress, type HeatMode, HeatMap, zoom } from "../components/heatmap";
import { CsvButton, ErrorMessage, Loaded, Message, Panel, Segments, useTableToggle } from "../components/panel";
import { Schedule, stageFigures } from "../components/schedule";
import { saveCsv, saveJson } from "../download";
import { decimal, groupRanks, integer, percent, plural, rankRange, seconds, short, signedPercent, times } from "../format";
import { type Resource, useResource } from "../resource";
import { go, href, numberOption, type OptionChange, type Route, withOptions } from "../router";
import { degreeColour, rgb } from "../theme";
import { State } from "./overview";

const PAGE_ROWS = 25;
/** Most rows that the API gives at once. */
const EXPORT_ROWS = 500;

/** `…/iterations/latest`: goes on to the newest iteration that has a plan. */
export function LatestIteration({ job, stream }: { job: Job; stream: Stream }) {
  const { route, live } = useView();
  const list = useResource<IterationList>(endpoint(jobPath(job.job, "/iterations"), { stream, limit: 20 }), live.version);
  const newest = list.data?.iterations.find((it) => it.digest);
  if (newest) {
    // After this render, so that the address changes once the page is there.
    queueMicrotask(() => go({ ...route, iteration: newest.iteration }, { replace: true }));
  }
  return (
    <Loaded resource={list} height={480}>
      {() =>
        !newest && (
          <Message title={`No ${stream} iteration of ${job.job} has a plan yet`}>
            This page opens the first one as soon as it is planned. The overview shows what is being collected.
          </Message>
        )
      }
    </Loaded>
  );
}

export function Iteration({ job, stream, iteration }: { job: Job; stream: Stream; iteration: number }) {
  const { route, live } = useView();
  const base = jobPath(job.job, `/iterations/${iteration}`);
  const summary = useResource<IterationSummary>(endpoint(base, { stream }), live.version);
  // A plan never changes: what is derived from it is fetched once for each digest.
  const digest = summary.data?.digest ?? "";
  const load = useResource<LoadMap>(digest ? endpoint(`${base}/load`, { stream }) : null, digest);
  const pipeline = numberOption(route, "pipeline");
  const timeline = useResource<Timeline>(digest ? endpoint(`${base}/timeline`, { stream, pipeline }) : null, digest);
  const chosen = numberOption(route, "seq");
  const one = useResource<PlanPage>(
    digest && chosen !== null ? endpoint(`${base}/plan`, { stream, sort: "id", offset: chosen, limit: 1 }) : null,
    digest,
  );
  const sequence = one.data?.sequences[0] ?? null;
  const set = (change: OptionChange) => go(withOptions(route, change), { replace: true });

  const it = summary.data;
  return (
    <>
      <Heading job={job} iteration={iteration} it={it}>
        <CopyLink />
        <button
          type="button"
          disabled={it === null}
          onClick={() => saveJson(`${job.job}-${stream}-${iteration}`, { summary: it, load: load.data, timeline: timeline.data, sequence })}
        >
          Download JSON
        </button>
      </Heading>
      <Loaded resource={summary} height={120}>
        {(data) => (
          <>
            {data.failure && (
              <Message title={data.failure.message} tone="bad">
                <code>{data.failure.reason}</code> The ranks planned this iteration themselves, if they ran it.
              </Message>
            )}
            {data.digest === null || data.digest === undefined ? (
              !data.failure && (
                <Message title={`Iteration ${iteration} is ${data.state}`}>
                  Its plan shows here when all {plural(job.loader_shards, "loader shard")} have come and the planner is done.
                </Message>
              )
            ) : (
              <IterationFigures it={data} />
            )}
          </>
        )}
      </Loaded>
      {it?.digest && (
        <div class="columns">
          <LoadPanel job={job} it={it} load={load} sequence={sequence} set={set} />
          <TimelinePanel timeline={timeline} pipeline={pipeline} set={set} />
          <DegreePanel it={it} />
          <SequencePanel job={job} it={it} base={base} stream={stream} chosen={chosen} detail={one} set={set} />
        </div>
      )}
    </>
  );
}

/* ---- Heading ---------------------------------------------------------------------------------------------------- */

interface HeadingProps {
  job: Job;
  iteration: number;
  it: IterationSummary | null;
  children: ComponentChildren;
}

function Heading({ job, iteration, it, children }: HeadingProps) {
  const { route } = useView();
  // Another iteration has other sequences, so the choices that name one do not come along.
  const options = new Map([...route.options].filter(([name]) => !["seq", "mb", "rank", "offset"].includes(name)));
  // Only known of the train stream; elsewhere the next one is offered, and says if it does not exist.
  const newest = it?.stream === "train" && iteration >= (job.newest_planned ?? 0);
  const to = (n: number): Route => ({ ...route, iteration: n, options });
  return (
    <section class="heading">
      <div class="title">
        <h1>Iteration {integer(iteration)}</h1>
        {it && <State it={it} />}
        <span class="spacer" />
        <nav class="steps" aria-label="Iterations">
          {iteration > 0 && <a href={href(to(iteration - 1))} rel="prev">‹ {iteration - 1}</a>}
          {!newest && <a href={href(to(iteration + 1))} rel="next">{iteration + 1} ›</a>}
          <a href={href({ ...to(0), iteration: null })}>Latest</a>
        </nav>
        <div class="toolbar">{children}</div>
      </div>
      {it && (
        <p class="lead">
          {plural(it.sequences, "sequence")}, {short(it.tokens)} tokens, the longest {integer(it.longest_tokens)}
          {it.digest && (
            <>
              {" "}
              in {plural(it.microbatches, "microbatch", "microbatches")} on {plural(job.pool.ranks, "rank")}, by policy {it.policy}
              {it.cap > 0 && <>, cap C = {integer(it.cap)}</>}
              {it.target > 0 ? <>, Λ = {short(it.target)} token²</> : <>, the fullest rank has a load of {short(it.load_max)} token²</>}
            </>
          )}
          .{it.fallback_reason && <> The ranks planned it themselves: {it.fallback_reason}.</>}
        </p>
      )}
      {it?.digest && (
        <p class="note">
          Plan <code>{it.digest}</code>
        </p>
      )}
    </section>
  );
}

function IterationFigures({ it }: { it: IterationSummary }) {
  const over = (policy: string) => {
    const baseline = it.baselines_s?.[policy];
    return baseline !== undefined && it.predicted_s > 0 ? baseline / it.predicted_s : null;
  };
  const difference = it.measured_s && it.predicted_s > 0 ? it.measured_s / it.predicted_s - 1 : null;
  const ratio =
    difference !== null && Math.abs(difference) >= 1
      ? `${times(difference + 1)} the prediction`
      : `${signedPercent(difference)} against the prediction`;
  return (
    <Figures
      label="Key figures of the iteration"
      figures={[
        { label: "Predicted", value: seconds(it.predicted_s), note: `bound ${seconds(it.lower_bound_s)}` },
        {
          label: "Measured",
          value: seconds(it.measured_s),
          note: difference === null ? "not reported yet" : ratio,
        },
        { label: "Over Megatron-style", value: times(over("megatron")), note: baselineNote(it, "megatron") },
        { label: "Over static CP", value: times(over("static_cp")), note: baselineNote(it, "static_cp") },
        { label: "PP · DP bubble", value: `${percent(it.pp_bubble)} · ${percent(it.dp_bubble)}`, note: "predicted" },
        { label: "Imbalance", value: decimal(it.imbalance, 2), note: `idle slots ${percent(it.idle_share)}` },
        {
          label: "Planning",
          value: seconds(it.plan_s),
          note: it.plan_wait_s === null || it.plan_wait_s === undefined ? "no wait reported" : `ranks waited ${seconds(it.plan_wait_s)}`,
        },
      ]}
    />
  );
}

function baselineNote(it: IterationSummary, policy: string): string {
  const baseline = it.baselines_s?.[policy];
  return baseline === undefined ? "not computed for this batch" : `would take ${seconds(baseline)}`;
}

/* ---- Load ------------------------------------------------------------------------------------------------------- */

interface LoadPanelProps {
  job: Job;
  it: IterationSummary;
  load: Resource<LoadMap>;
  sequence: PlacedSequence | null;
  set: (change: OptionChange) => void;
}

function parseRange(text: string | undefined, ranks: number): readonly [number, number] {
  const match = /^(\d+)-(\d+)$/.exec(text ?? "");
  const first = Math.min(ranks - 1, Number(match?.[1] ?? 0));
  const last = Math.min(ranks - 1, Number(match?.[2] ?? ranks - 1));
  return last >= first ? [first, last] : [0, ranks - 1];
}

function LoadPanel({ job, it, load, sequence, set }: LoadPanelProps) {
  const { palette, route } = useView();
  const [asTable, toggle] = useTableToggle("load");
  const asked = route.options.get("show");
  const mode: HeatMode = asked === "tokens" || asked === "degree" ? asked : "load";
  const ranks = load.data?.ranks ?? job.pool.ranks;
  const range = parseRange(route.options.get("ranks"), ranks);
  const whole = range[0] === 0 && range[1] === ranks - 1;
  const setRange = ([first, last]: readonly [number, number]) =>
    set({ ranks: first === 0 && last === ranks - 1 ? null : `${first}-${last}` });
  const name = `${job.job}-${it.stream}-${it.iteration}-load`;
  return (
    <Panel
      id="load"
      title="Load"
      className="full"
      note={
        whole
          ? `All ${plural(ranks, "rank")} × ${plural(it.microbatches, "microbatch", "microbatches")}; gaps part the groups, ×n is their degree`
          : `Ranks ${integer(range[0])}–${integer(range[1])} of ${integer(ranks)}`
      }
      controls={
        <>
          <Segments
            label="What the colours show"
            value={mode}
            choices={[
              ["load", "Load"],
              ["tokens", "Tokens"],
              ["degree", "Degree"],
            ]}
            onChoose={(value) => set({ show: value === "load" ? null : value })}
          />
          <div class="segments" role="group" aria-label="Zoom of the ranks">
            <button type="button" aria-label="Zoom out" disabled={whole} onClick={() => setRange(zoom(range, ranks, 2))}>
              −
            </button>
            <button type="button" aria-label="Zoom in" disabled={ranks <= 4} onClick={() => setRange(zoom(range, ranks, 0.5))}>
              +
            </button>
            <button type="button" disabled={whole} onClick={() => setRange([0, ranks - 1])}>
              All
            </button>
          </div>
          {toggle}
          <CsvButton what="load and tokens of all cells" onClick={() => load.data && saveLoad(name, load.data)} />
        </>
      }
    >
      <Loaded resource={load} height={300}>
        {(map) =>
          asTable ? (
            <LoadTable map={map} target={it.target} />
          ) : (
            <HeatMap
              map={map}
              mode={mode}
              budget={job.pool.token_budget}
              target={it.target}
              palette={palette}
              range={range}
              onRange={setRange}
              selected={selectedGroup(map, route, sequence)}
              onPick={({ rank, microbatch }) => set({ rank, mb: microbatch, offset: null, seq: null })}
            />
          )
        }
      </Loaded>
    </Panel>
  );
}

/** The group of the chosen sequence, or of the chosen cell. */
function selectedGroup(map: LoadMap, route: Route, sequence: PlacedSequence | null): GroupAddress | null {
  if (sequence) return sequence;
  const [rank, microbatch] = [numberOption(route, "rank"), numberOption(route, "mb")];
  if (rank === null || microbatch === null) return null;
  const degree = map.degree[rank]?.[microbatch];
  if (!degree) return null;
  return { microbatch, start: map.start[rank]![microbatch]!, degree };
}

function saveLoad(name: string, map: LoadMap): void {
  const rows = map.load.flatMap((row, rank) =>
    row.map((load, microbatch) => [
      rank,
      microbatch,
      load,
      map.tokens[rank]![microbatch],
      map.degree[rank]![microbatch],
      map.start[rank]![microbatch],
    ]),
  );
  saveCsv(name, ["rank", "microbatch", "load", "tokens", "degree", "start"], rows);
}

/** The heat map in figures: a row per microbatch. */
function LoadTable({ map, target }: { map: LoadMap; target: number }) {
  const rows = Array.from({ length: map.microbatches }, (_, microbatch) => {
    const loads = map.load.map((row) => row[microbatch]!);
    const degrees = new Map<number, number>();
    let [groups, idle, tokens] = [0, 0, 0];
    for (let rank = 0; rank < map.ranks; rank++) {
      const degree = map.degree[rank]![microbatch]!;
      tokens = Math.max(tokens, map.tokens[rank]![microbatch]!);
      if (degree === 0) idle++;
      else if (map.start[rank]![microbatch] === rank) {
        groups++;
        degrees.set(degree, (degrees.get(degree) ?? 0) + 1);
      }
    }
    const most = loads.reduce((top, value) => Math.max(top, value), 0);
    const mean = loads.reduce((sum, value) => sum + value, 0) / Math.max(1, map.ranks);
    const shape = [...degrees].sort(([a], [b]) => b - a).map(([degree, n]) => `${n} × degree ${degree}`);
    return { microbatch, most, mean, tokens, groups, idle, shape: shape.join(", ") };
  });
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Load of each microbatch, table">
      <table>
        <thead>
          <tr>
            <th scope="col">MB</th>
            <th scope="col" class="number">Largest load</th>
            {target > 0 && <th scope="col" class="number">of Λ</th>}
            <th scope="col" class="number">Mean load</th>
            <th scope="col" class="number">Most tokens</th>
            <th scope="col" class="number">Idle ranks</th>
            <th scope="col" class="number">Groups</th>
            <th scope="col">Degrees</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={row.microbatch}>
              <th scope="row">{row.microbatch}</th>
              <td class="number">{short(row.most)}</td>
              {target > 0 && <td class="number">{percent(row.most / target, 0)}</td>}
              <td class="number">{short(row.mean)}</td>
              <td class="number">{integer(row.tokens)}</td>
              <td class="number">{integer(row.idle)}</td>
              <td class="number">{integer(row.groups)}</td>
              <td>{row.shape}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/* ---- Pipeline --------------------------------------------------------------------------------------------------- */

interface TimelinePanelProps {
  timeline: Resource<Timeline>;
  pipeline: number | null;
  set: (change: OptionChange) => void;
}

function TimelinePanel({ timeline, pipeline, set }: TimelinePanelProps) {
  const { palette, route } = useView();
  const [asTable, toggle] = useTableToggle("timeline");
  const { data } = timeline;
  return (
    <Panel
      id="timeline"
      title="Pipeline schedule"
      className="main"
      note={
        data
          ? `Predicted 1F1B of pipeline ${data.pipeline}${pipeline === null ? ", the slowest" : ""}: ${seconds(data.span_s)}, ${percent(data.pp_bubble)} bubble`
          : "Predicted 1F1B schedule"
      }
      controls={
        <>
          {(data ? data.pipelines > 1 : pipeline !== null) && (
            <PipelinePicker pipelines={data?.pipelines ?? Infinity} value={pipeline} choose={(value) => set({ pipeline: value || null })} />
          )}
          {toggle}
          <CsvButton
            what="the schedule"
            onClick={() =>
              data &&
              saveCsv(
                `${route.job}-${route.iteration}-timeline`,
                ["stage", "microbatch", "kind", "start_s", "end_s"],
                data.operations.map((op) => [op.stage, op.microbatch, op.kind, op.start_s, op.end_s]),
              )
            }
          />
        </>
      }
    >
      <ul class="legend">
        <li>
          <span class="swatch block" style={{ color: palette.forward }} />
          forward
        </li>
        <li>
          <span class="swatch block" style={{ color: palette.backward }} />
          backward
        </li>
        <li class="muted">numbers are microbatches</li>
      </ul>
      <Loaded resource={timeline} height={260}>
        {(value) => (asTable ? <StageTable timeline={value} /> : <Schedule timeline={value} palette={palette} />)}
      </Loaded>
    </Panel>
  );
}

interface PipelinePickerProps {
  pipelines: number;
  value: number | null;
  choose: (value: string) => void;
}

/** A list of a few pipelines, a field for thousands; empty is the slowest. */
function PipelinePicker({ pipelines, value, choose }: PipelinePickerProps) {
  const onChange = (event: { currentTarget: { value: string } }) => choose(event.currentTarget.value);
  return (
    <label class="pick">
      <span>Pipeline</span>
      {pipelines > 64 ? (
        <input type="number" min={0} {...(Number.isFinite(pipelines) ? { max: pipelines - 1 } : {})} placeholder="slowest" value={value ?? ""} onChange={onChange} />
      ) : (
        <select value={value ?? ""} onChange={onChange}>
          <option value="">slowest</option>
          {Array.from({ length: pipelines }, (_, n) => (
            <option key={n} value={n}>
              {n}
            </option>
          ))}
        </select>
      )}
    </label>
  );
}

function StageTable({ timeline }: { timeline: Timeline }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Pipeline schedule, table">
      <table>
        <thead>
          <tr>
            <th scope="col">Stage</th>
            <th scope="col" class="number">Forward</th>
            <th scope="col" class="number">Backward</th>
            <th scope="col" class="number">First starts</th>
            <th scope="col" class="number">Idle</th>
          </tr>
        </thead>
        <tbody>
          {stageFigures(timeline).map((row) => (
            <tr key={row.stage}>
              <th scope="row">{row.stage}</th>
              <td class="number">{seconds(row.forward_s)}</td>
              <td class="number">{seconds(row.backward_s)}</td>
              <td class="number">{seconds(row.first_s)}</td>
              <td class="number">{percent(row.idle_share)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/* ---- Degrees ---------------------------------------------------------------------------------------------------- */

function DegreePanel({ it }: { it: IterationSummary }) {
  const { palette, route } = useView();
  const degrees = Object.keys(it.degree_share ?? {}).map(Number).sort((a, b) => a - b);
  const top = degrees.at(-1) ?? 1;
  const most = Math.max(...degrees.map((degree) => it.degree_share![degree]!), 0);
  return (
    <Panel
      id="histogram"
      title="Degrees"
      className="side"
      note="Share of the occupied rank × MB slots"
      controls={
        <CsvButton
          what="the degrees"
          onClick={() =>
            saveCsv(
              `${route.job}-${it.iteration}-degrees`,
              ["degree", "slot_share", "sequences"],
              degrees.map((degree) => [degree, it.degree_share![degree], it.degree_sequences?.[degree]]),
            )
          }
        />
      }
    >
      <table class="bars">
        <thead>
          <tr>
            <th scope="col">Degree</th>
            <th scope="col">Slots</th>
            <th scope="col" class="number">Sequences</th>
          </tr>
        </thead>
        <tbody>
          {degrees.map((degree) => {
            const share = it.degree_share![degree]!;
            return (
              <tr key={degree}>
                <th scope="row">{integer(degree)}</th>
                <td>
                  <span class="track">
                    <span class="fill" style={{ width: `${(share / most) * 100}%`, background: rgb(degreeColour(palette, degree, top)) }} />
                  </span>
                  <span class="share">{percent(share)}</span>
                </td>
                <td class="number">{integer(it.degree_sequences?.[degree])}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </Panel>
  );
}

/* ---- Sequences -------------------------------------------------------------------------------------------------- */

interface SequencePanelProps {
  job: Job;
  it: IterationSummary;
  base: string;
  stream: Stream;
  chosen: number | null;
  detail: Resource<PlanPage>;
  set: (change: OptionChange) => void;
}

const ORDERS = [
  ["length", "Longest first"],
  ["id", "By id"],
  ["microbatch", "By microbatch"],
] as const;
type OrderName = (typeof ORDERS)[number][0];

function SequencePanel({ job, it, base, stream, chosen, detail, set }: SequencePanelProps) {
  const { route } = useView();
  const sort: OrderName = ORDERS.find(([name]) => name === route.options.get("sort"))?.[0] ?? "length";
  const offset = numberOption(route, "offset") ?? 0;
  const microbatch = numberOption(route, "mb");
  const rank = numberOption(route, "rank");
  const query = { stream, sort, microbatch, rank };
  const page = useResource<PlanPage>(endpoint(`${base}/plan`, { ...query, offset, limit: PAGE_ROWS }), it.digest ?? "");
  const total = page.data?.total ?? 0;
  const name = `${job.job}-${stream}-${it.iteration}-sequences`;
  const [failure, setFailure] = useState<Error | null>(null);
  const [saved, setSaved] = useState<number | null>(null);
  const save = () => {
    setFailure(null);
    saveSequences(name, base, query, setSaved)
      .catch(setFailure)
      .finally(() => setSaved(null));
  };
  const chips: [string, OptionChange][] = [];
  if (microbatch !== null) chips.push([`microbatch ${microbatch}`, { mb: null, offset: null }]);
  if (rank !== null) chips.push([`rank ${rank}`, { rank: null, offset: null }]);

  return (
    <Panel
      id="sequences"
      title="Sequences"
      className="full"
      note="Choose one to see why it has its degree and its group"
      controls={
        <>
          {chips.map(([text, change]) => (
            <button key={text} type="button" class="chip" aria-label={`Remove the filter: ${text}`} onClick={() => set(change)}>
              {text} <span aria-hidden="true">×</span>
            </button>
          ))}
          <label class="pick">
            <span>Order</span>
            <select value={sort} onChange={(event) => set({ sort: event.currentTarget.value, offset: null })}>
              {ORDERS.map(([value, text]) => (
                <option key={value} value={value}>
                  {text}
                </option>
              ))}
            </select>
          </label>
          <CsvButton what="all of these sequences" share={saved} onClick={save} />
        </>
      }
    >
      {failure && <ErrorMessage error={failure} retry={save} />}
      <div class={chosen === null ? "split" : "split open"}>
        <div>
          <Loaded resource={page} height={420}>
            {(data) =>
              data.total === 0 ? (
                <Message title="No sequence here">This rank is idle in this microbatch. Remove a filter to see others.</Message>
              ) : (
                <SequenceTable rows={data.sequences} sort={sort} chosen={chosen} set={set} />
              )
            }
          </Loaded>
          <div class="pager">
            <span class="note">
              {total > 0 && `${integer(offset + 1)}–${integer(Math.min(total, offset + PAGE_ROWS))} of ${integer(total)}`}
            </span>
            <button type="button" disabled={offset === 0} onClick={() => set({ offset: Math.max(0, offset - PAGE_ROWS) || null })}>
              Previous
            </button>
            <button type="button" disabled={offset + PAGE_ROWS >= total} onClick={() => set({ offset: offset + PAGE_ROWS })}>
              Next
            </button>
          </div>
        </div>
        {chosen !== null && (
          <aside class="why" aria-label={`Why sequence ${chosen} is where it is`} aria-live="polite">
            <Loaded resource={detail} height={200}>
              {(data) => <Why sequence={data.sequences[0] ?? null} chosen={chosen} close={() => set({ seq: null })} />}
            </Loaded>
          </aside>
        )}
      </div>
    </Panel>
  );
}

interface SequenceTableProps {
  rows: readonly PlacedSequence[];
  sort: OrderName;
  chosen: number | null;
  set: (change: OptionChange) => void;
}

function SequenceTable({ rows, sort, chosen, set }: SequenceTableProps) {
  const head = (text: string, order?: OrderName, title?: string) => (
    <th
      scope="col"
      class="number"
      title={title}
      {...(order === sort ? { "aria-sort": order === "length" ? ("descending" as const) : ("ascending" as const) } : {})}
    >
      {order ? (
        <button type="button" class="sort" onClick={() => set({ sort: order === "length" ? null : order, offset: null })}>
          {text}
          {order === sort && <span aria-hidden="true">{order === "length" ? " ↓" : " ↑"}</span>}
        </button>
      ) : (
        text
      )}
    </th>
  );
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Sequences, table">
      <table class="rows">
        <thead>
          <tr>
            {head("Sequence", "id")}
            {head("Tokens", "length")}
            {head("MB", "microbatch")}
            {head("Degree")}
            {head("Ranks")}
            {head("Least degree", undefined, "Smallest degree that the token budget allows")}
            {head("Load", undefined, "Attention load on each of its ranks, token²/degree")}
            {head("Loaded by", undefined, "Loader shard")}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => {
            const open = row.id === chosen;
            return (
              <tr key={row.id} class={open ? "chosen" : ""} onClick={() => set({ seq: open ? null : row.id })}>
                <th scope="row" class="number">
                  <button
                    type="button"
                    class="link"
                    aria-pressed={open}
                    aria-label={`Why sequence ${row.id} is where it is`}
                    onClick={(event) => {
                      event.stopPropagation();
                      set({ seq: open ? null : row.id });
                    }}
                  >
                    {row.id}
                  </button>
                </th>
                <td class="number">{integer(row.length)}</td>
                <td class="number">{row.microbatch}</td>
                <td class="number">{integer(row.degree)}</td>
                <td class="number">{rankRange(row.start, row.degree)}</td>
                <td class="number">{integer(row.memory_degree)}</td>
                <td class="number">{short(row.load)}</td>
                <td class="number">{row.shard}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function Why({ sequence, chosen, close }: { sequence: PlacedSequence | null; chosen: number; close: () => void }) {
  const facts = useMemo<[string, string][]>(
    () =>
      sequence === null
        ? []
        : [
            ["Length", `${integer(sequence.length)} tokens`],
            ["Degree", `${integer(sequence.degree)} (budget allows ${integer(sequence.memory_degree)} or more)`],
            ["Group", `${groupRanks(sequence.start, sequence.degree)}, microbatch ${sequence.microbatch}`],
            ["Load", `${short(sequence.load)} token²/degree on each rank`],
          ],
    [sequence],
  );
  return (
    <>
      <header>
        <h3>Sequence {integer(chosen)}</h3>
        <button type="button" class="quiet" onClick={close}>
          Close
        </button>
      </header>
      {sequence === null ? (
        <p>This plan has no sequence {integer(chosen)}.</p>
      ) : (
        <>
          <p class="reason">{sequence.why}</p>
          <dl>
            {facts.map(([name, value]) => (
              <div key={name}>
                <dt>{name}</dt>
                <dd>{value}</dd>
              </div>
            ))}
          </dl>
          <p class="note">Its group is outlined in the load map.</p>
        </>
      )}
    </>
  );
}

/** Saves all sequences that pass the filters, fetched page by page; `tell` hears which share is there. */
async function saveSequences(
  name: string,
  base: string,
  query: Record<string, string | number | null>,
  tell: (share: number) => void,
): Promise<void> {
  const rows: PlacedSequence[] = [];
  for (let total = 1; rows.length < total; ) {
    tell(rows.length / total);
    const page = await get<PlanPage>(endpoint(`${base}/plan`, { ...query, offset: rows.length, limit: EXPORT_ROWS }));
    if (page.sequences.length === 0) break;
    rows.push(...page.sequences);
    total = page.total;
  }
  const columns = ["id", "length", "shard", "microbatch", "start", "degree", "memory_degree", "load", "why"] as const;
  saveCsv(name, columns, rows.map((row) => columns.map((column) => row[column])));
}
