/** Data of one endpoint as component state. */

import { useEffect, useState } from "preact/hooks";
import { get } from "./api";

export interface Resource<T> {
  data: T | null;
  error: Error | null;
  loading: boolean;
  reload: () => void;
}

/**
 * Fetches `url` when it changes and again when `version` does. Another url clears the data; another version keeps it
 * until the new data is there, and beside the error if none comes. A null url fetches nothing.
 */
export function useResource<T>(url: string | null, version: number | string = 0): Resource<T> {
  const [state, setState] = useState<{ url: string | null; data: T | null; error: Error | null; loading: boolean }>({
    url: null,
    data: null,
    error: null,
    loading: false,
  });
  const [attempt, setAttempt] = useState(0);
  useEffect(() => {
    if (url === null) return;
    const controller = new AbortController();
    setState((old) => ({
      url,
      data: old.url === url ? old.data : null,
      error: old.url === url ? old.error : null,
      loading: true,
    }));
    get<T>(url, controller.signal).then(
      (data) => setState({ url, data, error: null, loading: false }),
      (error: Error) => {
        if (!controller.signal.aborted) setState((old) => ({ ...old, error, loading: false }));
      },
    );
    return () => controller.abort();
  }, [url, version, attempt]);
  const reload = () => setAttempt((n) => n + 1);
  if (url === null) return { data: null, error: null, loading: false, reload };
  if (state.url !== url) return { data: null, error: null, loading: true, reload };
  return { data: state.data, error: state.error, loading: state.loading, reload };
}
