/** Is the planner ahead, and what does it gain? */

import { useMemo } from "preact/hooks";
import {
  endpoint,
  type EventPage,
  type ServiceEvent,
  type IterationPage,
  type IterationSummary,
  type Job,
  jobPath,
  type Stream,
} from "../api";
import { useView } from "../components/context";
import { type Series, SeriesPanel } from "../components/chart";
import { type Figure, Figures } from "../components/figures";
import { ErrorMessage, Message, Panel, CsvButton, Segments } from "../components/panel";
import { saveCsv, saveJson } from "../download";
import {
  ago,
  clock,
  decimal,
  integer,
  largest,
  median,
  MISSING,
  percent,
  plural,
  seconds,
  short,
  signedPercent,
  times,
} from "../format";
import { useResource } from "../resource";
import { go, href, numberOption, type Route, withOptions } from "../router";
import { degreeColour, rgb } from "../theme";
import { CopyLink } from "../components/header";

const WINDOWS = ["50", "100", "200"] as const;
const TABLE_ROWS = 20;

export function Overview({ job, stream }: { job: Job; stream: Stream }) {
  const { route, live } = useView();
  const limit = numberOption(route, "n") ?? 50;
  const page = useResource<IterationPage>(
    endpoint(jobPath(job.job, "/iterations"), { stream, limit }),
    live.version,
  );
  const events = useResource<EventPage>(endpoint("events", { limit: 100 }), live.version);
  const iterations = page.data?.iterations ?? [];

  return (
    <>
      <Verdict job={job} />
      <div class="toolbar">
        <Segments
          label="Iterations in the charts"
          value={String(limit)}
          choices={WINDOWS.map((n) => [n, `Last ${n}`] as const)}
          onChoose={(n) => go(withOptions(route, { n: n === "50" ? null : n }), { replace: true })}
        />
        <span class="spacer" />
        <CopyLink />
        <button type="button" onClick={() => saveJson(`${job.job}-overview`, { job, iterations, events: events.data?.events ?? [] })}>
          Download JSON
        </button>
        <button type="button" onClick={() => saveIterations(job.job, iterations)}>
          Download CSV
        </button>
      </div>
      {page.error && <ErrorMessage error={page.error} retry={page.reload} />}
      {page.data === null ? (
        !page.error && <div class="skeleton" style={{ height: "480px" }} role="status" aria-label="Loading iterations" />
      ) : iterations.length === 0 ? (
        <Message title={`No ${stream} iteration yet`}>
          The first one shows here as soon as an agent submits its lengths. Registered {ago(job.registered_at)} with{" "}
          {plural(job.loader_shards, "loader shard")}; an iteration is planned when all of them have come.
        </Message>
      ) : (
        <>
          <Figures label="Key figures" figures={figuresOf(iterations)} />
          <Charts iterations={iterations} />
          <IterationTable job={job.job} stream={stream} newest={page.data} />
        </>
      )}
      <Events resource={events.data} job={job.job} />
    </>
  );
}

/* ---- The verdict ------------------------------------------------------------------------------------------------ */

/** The service's verdict starts with one of these words and goes on with the reason. */
const CONDITIONS: Record<string, readonly [title: string, tone: "good" | "warn" | "plain"]> = {
  starting: ["The job is starting", "plain"],
  ahead: ["The planner is ahead", "good"],
  behind: ["The planner is behind", "warn"],
  "falling back": ["The ranks fall back to plans of their own", "warn"],
  failing: ["Planning fails", "warn"],
  silent: ["The job is silent", "warn"],
  idle: ["The job has run what it submitted", "plain"],
};

function Verdict({ job }: { job: Job }) {
  const colon = job.verdict.indexOf(": ");
  const condition = CONDITIONS[job.verdict.slice(0, colon)];
  const [title, tone] = condition ?? [job.verdict || "Nothing to judge yet", "plain"];
  const reason = condition ? job.verdict.slice(colon + 2) : "";
  const pool = job.pool;
  const facts: [string, string][] = [
    ["Policy", job.policy],
    ["Pool", `${plural(pool.ranks, "rank")}, ${plural(pool.stages, "stage")}${pool.ep > 1 ? `, EP ${pool.ep}` : ""}`],
    ["Token budget", integer(pool.token_budget)],
    ["Attempt", integer(job.attempt)],
    ["Newest plan", job.newest_planned === null || job.newest_planned === undefined ? MISSING : integer(job.newest_planned)],
    ["Newest executed", job.newest_executed === null || job.newest_executed === undefined ? MISSING : integer(job.newest_executed)],
    ["Agents last seen", ago(job.last_seen_at)],
  ];
  return (
    <section class={`verdict ${tone}`} aria-label="Verdict">
      <h1 aria-live="polite">{title}</h1>
      {reason && <p class="reason">{`${reason.charAt(0).toUpperCase()}${reason.slice(1)}.`}</p>}
      <dl class="facts">
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}

/* ---- Key figures ------------------------------------------------------------------------------------------------ */

/** Predicted time of a baseline over that of the plan. */
function gain(it: IterationSummary, policy: string): number | null {
  const baseline = it.baselines_s?.[policy];
  return baseline !== undefined && it.predicted_s > 0 ? baseline / it.predicted_s : null;
}

function lessTime(ratio: number): string {
  const saved = 1 - 1 / ratio;
  if (Math.abs(saved) < 0.005) return "the same time";
  return `${percent(Math.abs(saved), 0)} ${saved > 0 ? "less" : "more"} time`;
}

function figuresOf(newestFirst: readonly IterationSummary[]): Figure[] {
  const its = [...newestFirst].reverse();
  const waits = its.map((it) => it.plan_wait_s ?? null);
  const executed = its.filter((it) => it.measured_s && it.plan_wait_s !== null && it.plan_wait_s !== undefined);
  const waitShare = median(executed.map((it) => it.plan_wait_s! / it.measured_s!));
  const ratios = its.map((it) => (it.measured_s && it.predicted_s > 0 ? it.measured_s / it.predicted_s : null));
  const ratio = median(ratios);
  const planned = its.filter((it) => it.predicted_s > 0);
  const gap = median(planned.map((it) => (it.lower_bound_s > 0 ? it.predicted_s / it.lower_bound_s - 1 : null)));
  const local = its.filter((it) => it.origin === "local").length;
  const failed = its.filter((it) => it.state === "failed").length;
  const over = (policy: string, label: string): Figure => {
    const gains = its.map((it) => gain(it, policy));
    const middle = median(gains);
    return {
      label,
      value: times(middle),
      note: middle === null ? "not computed for these batches" : `predicted, median; ${lessTime(middle)}`,
      trend: gains,
    };
  };
  return [
    {
      label: "Wait for plans",
      value: seconds(median(waits)),
      note: `median, most ${seconds(largest(waits))}; ${percent(waitShare, 2)} of the iteration`,
      trend: waits,
      tone: waitShare !== null && waitShare > 0.02 ? "warn" : "plain",
    },
    over("megatron", "Gain over Megatron-style"),
    over("static_cp", "Gain over static CP"),
    {
      label: "Measured / predicted",
      value: times(ratio),
      note: ratio === null ? "nothing measured yet" : "median; cost model against the slowest rank",
      trend: ratios,
    },
    {
      label: "Above the lower bound",
      value: signedPercent(gap),
      note: "median; no valid plan is faster than the bound",
      trend: its.map((it) => (it.lower_bound_s > 0 ? it.predicted_s / it.lower_bound_s : null)),
    },
    {
      label: "PP · DP bubble",
      value: `${percent(median(planned.map((it) => it.pp_bubble)))} · ${percent(median(planned.map((it) => it.dp_bubble)))}`,
      note: `imbalance ${decimal(median(planned.map((it) => it.imbalance)), 2)}, idle slots ${percent(median(planned.map((it) => it.idle_share)))}`,
    },
    {
      label: "Fallbacks",
      value: integer(local),
      note: failed > 0 ? `${plural(failed, "plan")} failed` : `in ${plural(its.length, "iteration")}; no plan failed`,
      tone: local + failed > 0 ? "warn" : "plain",
    },
  ];
}

/* ---- Charts ----------------------------------------------------------------------------------------------------- */

const GAIN_NAMES: Record<string, string> = { static_cp: "static CP", megatron: "Megatron-style" };

function Charts({ iterations: newestFirst }: { iterations: readonly IterationSummary[] }) {
  const { palette, route } = useView();
  const its = useMemo(() => [...newestFirst].reverse(), [newestFirst]);
  const numbers = its.map((it) => it.iteration);
  const column = (pick: (it: IterationSummary) => number | null | undefined) =>
    its.map((it) => {
      const value = pick(it);
      return value === undefined || value === null || !Number.isFinite(value) ? null : value;
    });
  const planned = (pick: (it: IterationSummary) => number) => column((it) => (it.digest ? pick(it) : null));
  const open = (iteration: number) => go(iterationRoute(route, iteration));

  const time: Series[] = [
    { name: "measured", values: column((it) => it.measured_s), colour: palette.orange, width: 2.25 },
    { name: "predicted", values: planned((it) => it.predicted_s), colour: palette.blue, width: 2.25 },
    { name: "lower bound", values: planned((it) => it.lower_bound_s), colour: palette.green, dash: "dotted" },
    ...["megatron", "static_cp"].map((policy, k) => ({
      name: `${GAIN_NAMES[policy]}, predicted`,
      values: column((it) => it.baselines_s?.[policy]),
      colour: k ? palette.grey : palette.purple,
      dash: "dashed" as const,
    })),
  ];
  const middles = time.map((s) => median(s.values)).filter((v): v is number => v !== null && v > 0);
  const apart = middles.length > 1 && Math.max(...middles) / Math.min(...middles) > 6;
  const scale = route.options.get("scale") ?? (apart ? "log" : "linear");
  const degrees = [...new Set(its.flatMap((it) => Object.keys(it.degree_share ?? {}).map(Number)))].sort((a, b) => a - b);
  const top = degrees.at(-1) ?? 1;

  return (
    <div class="charts">
      <SeriesPanel
        id="time"
        title="Iteration time"
        note="Plan and other policies by the cost model, on the same batch; measured on the slowest rank"
        className="wide"
        height={248}
        iterations={numbers}
        series={time}
        format={seconds}
        axisFormat={(value) => seconds(value, true)}
        log={scale === "log"}
        onPick={open}
        controls={
          <Segments
            label="Axis of iteration time"
            value={scale}
            choices={[
              ["linear", "Linear"],
              ["log", "Log"],
            ]}
            onChoose={(value) => go(withOptions(route, { scale: value }), { replace: true })}
          />
        }
      />
      <SeriesPanel
        id="ahead"
        title="Is the planner ahead?"
        note="Lead: how long a plan lay ready before the first rank asked"
        height={248}
        iterations={numbers}
        series={[
          { name: "lead", values: column((it) => it.lead_s), colour: palette.green },
          { name: "planning", values: planned((it) => it.plan_s), colour: palette.blue },
          { name: "wait of the ranks", values: column((it) => it.plan_wait_s), colour: palette.orange },
        ]}
        format={seconds}
        axisFormat={(value) => seconds(value, true)}
        log
        floor={1e-4}
        onPick={open}
      />
      <SeriesPanel
        id="bubbles"
        title="Bubbles"
        note="Predicted idle share: within pipelines, between replicas"
        iterations={numbers}
        series={[
          { name: "PP bubble", values: planned((it) => it.pp_bubble), colour: palette.blue },
          { name: "DP bubble", values: planned((it) => it.dp_bubble), colour: palette.orange },
        ]}
        format={percent}
        axisFormat={(value) => percent(value, 0)}
        onPick={open}
      />
      <SeriesPanel
        id="imbalance"
        title="Imbalance and padding"
        note="Largest over mean attention load; padded over real tokens"
        iterations={numbers}
        series={[
          { name: "load, largest / mean", values: planned((it) => it.imbalance), colour: palette.purple },
          { name: "tokens, padded / real", values: planned((it) => it.padding), colour: palette.grey, dash: "dashed" },
        ]}
        format={(value) => decimal(value, 2)}
        fitted
        onPick={open}
      />
      <SeriesPanel
        id="degrees"
        title="Degrees"
        note="Share of the occupied rank × MB slots; ×n is a degree"
        iterations={numbers}
        series={degrees.map((degree) => ({
          name: `×${degree}`,
          values: planned((it) => it.degree_share?.[String(degree)] ?? 0),
          colour: rgb(degreeColour(palette, degree, top)),
        }))}
        format={percent}
        axisFormat={(value) => percent(value, 0)}
        stacked
        top={1}
        onPick={open}
      />
      <SeriesPanel
        id="loss"
        title="Loss"
        note="As the agents reported it"
        iterations={numbers}
        series={[{ name: "loss", values: column((it) => it.loss), colour: palette.orange }]}
        format={decimal}
        axisFormat={(value) => decimal(value, 1)}
        fitted
        onPick={open}
      />
    </div>
  );
}

/* ---- Iterations ------------------------------------------------------------------------------------------------- */

function iterationRoute(route: Route, iteration: number, stream = route.options.get("stream") ?? "train"): Route {
  return { page: "iteration", job: route.job, iteration, options: new Map(stream === "train" ? [] : [["stream", stream]]) };
}

function IterationTable({ job, stream, newest }: { job: string; stream: Stream; newest: IterationPage }) {
  const { route } = useView();
  const before = numberOption(route, "before");
  const older = useResource<IterationPage>(
    before === null ? null : endpoint(jobPath(job, "/iterations"), { stream, limit: TABLE_ROWS, before }),
  );
  const rows = before === null ? newest.iterations.slice(0, TABLE_ROWS) : (older.data?.iterations ?? []);
  const next =
    before === null
      ? newest.iterations.length > TABLE_ROWS
        ? rows.at(-1)!.iteration
        : newest.next_before
      : older.data?.next_before;
  const page = (value: number | null) => go(withOptions(route, { before: value }), { replace: true });
  return (
    <Panel
      id="iterations"
      title="Iterations"
      note={before === null ? "Newest first" : `Before iteration ${before}`}
      controls={<CsvButton what="these iterations" onClick={() => saveIterations(job, rows)} />}
    >
      {older.error && <ErrorMessage error={older.error} retry={older.reload} />}
      <div class="scroll" tabIndex={0} role="region" aria-label="Iterations, table">
        <table class="rows">
          <thead>
            <tr>
              {COLUMNS.map((column) => (
                <th key={column.name} scope="col" class={column.text ? "" : "number"} title={column.title}>
                  {column.name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map((it) => (
              <tr key={it.iteration}>
                {COLUMNS.map((column, k) =>
                  k === 0 ? (
                    <th key={column.name} scope="row">
                      <a href={href(iterationRoute(route, it.iteration))}>{it.iteration}</a>
                    </th>
                  ) : (
                    <td key={column.name} class={column.text ? "" : "number"}>
                      {column.name === "State" ? <State it={it} /> : column.show(it)}
                    </td>
                  ),
                )}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <div class="pager">
        <button type="button" disabled={before === null} onClick={() => page(null)}>
          Newest
        </button>
        <button type="button" disabled={next === null || next === undefined} onClick={() => page(next!)}>
          Older
        </button>
      </div>
    </Panel>
  );
}

export function State({ it }: { it: IterationSummary }) {
  const local = it.origin === "local";
  const tone = it.state === "failed" ? "bad" : local ? "warn" : it.state === "executed" ? "good" : "plain";
  const why = it.failure?.message ?? it.fallback_reason ?? undefined;
  return (
    <span class={`state ${tone}`} title={why}>
      {local ? "executed, fallback" : it.state}
    </span>
  );
}

interface Column {
  name: string;
  title: string;
  text?: boolean;
  show: (it: IterationSummary) => string;
}

const planOnly = (show: (it: IterationSummary) => string) => (it: IterationSummary) => (it.digest ? show(it) : MISSING);

const COLUMNS: readonly Column[] = [
  { name: "Iteration", title: "Number within its stream", text: true, show: (it) => String(it.iteration) },
  { name: "State", title: "Where it is in its life", text: true, show: (it) => it.state },
  { name: "Sequences", title: "Sequences of the batch", show: (it) => integer(it.sequences) },
  { name: "Tokens", title: "Tokens of the batch", show: (it) => short(it.tokens) },
  { name: "Longest", title: "Tokens of the longest sequence", show: (it) => integer(it.longest_tokens) },
  { name: "MBs", title: "Microbatches, M", show: planOnly((it) => integer(it.microbatches)) },
  { name: "Load", title: "Attention load of the fullest rank of any microbatch, token²", show: planOnly((it) => short(it.load_max)) },
  { name: "Predicted", title: "Predicted iteration time", show: planOnly((it) => seconds(it.predicted_s)) },
  { name: "Measured", title: "Iteration time of the slowest rank", show: (it) => seconds(it.measured_s) },
  { name: "vs Megatron", title: "Predicted time of Megatron-style CP over that of the plan", show: (it) => times(gain(it, "megatron")) },
  { name: "vs static", title: "Predicted time of static CP over that of the plan", show: (it) => times(gain(it, "static_cp")) },
  { name: "Wait", title: "Longest wait of any rank for the plan", show: (it) => seconds(it.plan_wait_s) },
  { name: "Planning", title: "Time that planning took", show: planOnly((it) => seconds(it.plan_s)) },
  { name: "PP", title: "PP bubble", show: planOnly((it) => percent(it.pp_bubble)) },
  { name: "DP", title: "DP bubble", show: planOnly((it) => percent(it.dp_bubble)) },
  { name: "Imbalance", title: "Largest over mean attention load", show: planOnly((it) => decimal(it.imbalance, 2)) },
  { name: "Loss", title: "Loss that the agents reported", show: (it) => decimal(it.loss) },
];

function saveIterations(job: string, rows: readonly IterationSummary[]): void {
  const plain = [
    "iteration", "stream", "state", "policy", "digest", "sequences", "tokens", "longest_tokens", "microbatches", "cap", "target",
    "predicted_s", "lower_bound_s", "measured_s", "plan_s", "lead_s", "plan_wait_s", "pp_bubble", "dp_bubble", "load_max",
    "load_mean", "imbalance", "padding", "idle_share", "origin", "fallback_reason", "loss",
  ] as const satisfies readonly (keyof IterationSummary)[];
  const policies = [...new Set(rows.flatMap((it) => Object.keys(it.baselines_s ?? {})))].sort();
  saveCsv(
    `${job}-iterations`,
    [...plain, ...policies.map((policy) => `${policy}_s`)],
    rows.map((it) => [...plain.map((name) => it[name]), ...policies.map((policy) => it.baselines_s?.[policy])]),
  );
}

/* ---- Events ----------------------------------------------------------------------------------------------------- */

function Events({ resource, job }: { resource: EventPage | null; job: string }) {
  const events = (resource?.events ?? []).filter((event) => event.job === null || event.job === undefined || event.job === job).slice(0, 12);
  if (events.length === 0) return null;
  return (
    <Panel id="events" title="Events" note="What the service noted about this job, newest first">
      <ol class="events">
        {events.map((event) => (
          <li key={event.id} class={/fail|fallback|fence|supersede/.test(event.kind) ? "warn" : ""}>
            <time dateTime={new Date(event.at * 1000).toISOString()}>{clock(event.at)}</time>
            <span class="kind">{event.kind.replaceAll("_", " ")}</span>
            <EventMessage event={event} />
          </li>
        ))}
      </ol>
    </Panel>
  );
}

/** The message, with the iteration that it starts with as a link. */
function EventMessage({ event }: { event: ServiceEvent }) {
  const { route } = useView();
  const { iteration, message } = event;
  const lead = `iteration ${iteration}`;
  if (iteration === null || iteration === undefined || !message.startsWith(lead)) return <span>{message}</span>;
  return (
    <span>
      <a href={href(iterationRoute(route, iteration, event.stream ?? undefined))}>{lead}</a>
      {message.slice(lead.length)}
    </span>
  );
}
