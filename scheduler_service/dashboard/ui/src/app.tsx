/** Finds the job and the page that the address names. */

import { useEffect, useMemo, useRef } from "preact/hooks";
import { endpoint, type Job, type ServiceStatistics, STREAMS } from "./api";
import { ViewContext } from "./components/context";
import { Header } from "./components/header";
import { Loaded, Message } from "./components/panel";
import { useLive } from "./live";
import { Iteration, LatestIteration } from "./pages/iteration";
import { Overview } from "./pages/overview";
import { useResource } from "./resource";
import { href, useRoute } from "./router";
import { useTheme } from "./theme";

export function App() {
  const address = useRoute();
  const live = useLive();
  const { choice, palette, choose } = useTheme();
  const jobs = useResource<Job[]>(endpoint("jobs"), live.version);
  const statistics = useResource<ServiceStatistics>(endpoint("statistics"), live.version);

  // Without a job in the address: the most recently active one, which the API lists first.
  const name = address.job ?? jobs.data?.[0]?.job ?? null;
  const job = jobs.data?.find((each) => each.job === name) ?? null;
  const stream = STREAMS.find((each) => each === address.options.get("stream")) ?? "train";
  const route = useMemo(() => ({ ...address, job: name }), [address, name]);
  const view = useMemo(() => ({ route, palette, live }), [route, palette, live.status, live.version]);

  const main = useRef<HTMLElement>(null);
  const place = `${route.page}/${route.iteration ?? ""}`;
  const shown = useRef(place);
  useEffect(() => {
    const what = route.page === "iteration" ? `Iteration ${route.iteration ?? ""}` : "Overview";
    document.title = name ? `${what} · ${name} · HyDra-CP` : "HyDra-CP";
    // A reader who went to another page by keyboard goes on in it, and not in the bar above.
    if (shown.current.split("/")[0] !== route.page) {
      main.current?.focus({ preventScroll: true });
      window.scrollTo(0, 0);
    }
    shown.current = place;
  }, [place, name]);

  return (
    <ViewContext.Provider value={view}>
      <a class="skip" href="#main" onClick={(event) => {
        event.preventDefault();
        main.current?.focus();
      }}>
        Skip to the content
      </a>
      <Header route={route} jobs={jobs.data ?? []} job={job} stream={stream} live={live.status} theme={choice} onTheme={choose} />
      <main id="main" tabIndex={-1} ref={main}>
        <Loaded resource={jobs} height={480}>
          {(list) =>
            list.length === 0 ? (
              <NoJobs statistics={statistics.data} />
            ) : job === null ? (
              <Message title={`There is no job ${name}`}>
                The scheduler knows{" "}
                {list.map((each, k) => (
                  <span key={each.job}>
                    {k > 0 && ", "}
                    <a href={href({ page: "overview", job: each.job })}>{each.job}</a>
                  </span>
                ))}
                .
              </Message>
            ) : route.page === "overview" ? (
              <Overview key={job.job + stream} job={job} stream={stream} />
            ) : route.iteration === null ? (
              <LatestIteration job={job} stream={stream} />
            ) : (
              <Iteration job={job} stream={stream} iteration={route.iteration} />
            )
          }
        </Loaded>
      </main>
      <footer>
        {statistics.data && (
          <>
            HyDra-CP {statistics.data.version} · gRPC {statistics.data.grpc_address} · plan history {statistics.data.store} ·{" "}
            <a href="api/v1/openapi.json">OpenAPI</a>
          </>
        )}
      </footer>
    </ViewContext.Provider>
  );
}

function NoJobs({ statistics }: { statistics: ServiceStatistics | null }) {
  return (
    <Message title="No job has registered yet">
      <p>
        Point the plan agent of a training job at{" "}
        <code>{statistics?.grpc_address || "the gRPC address of this scheduler"}</code>; it shows here with its first call.
      </p>
      <p>
        To see one without a cluster, run <code>make run</code> in a source tree: it trains a small model with four CPU workers through its own
        scheduler.
      </p>
    </Message>
  );
}
