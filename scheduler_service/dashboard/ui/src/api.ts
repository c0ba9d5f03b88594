/** The REST API: types from its OpenAPI schema, and one function that fetches. */

import type { components } from "../generated/api-types";

type Schemas = components["schemas"];
export type Job = Schemas["Job"];
export type IterationSummary = Schemas["IterationSummary"];
export type IterationPage = Schemas["IterationPage"];
export type LoadMap = Schemas["LoadMap"];
export type Timeline = Schemas["Timeline"];
export type PlacedSequence = Schemas["PlacedSequence"];
export type PlanPage = Schemas["PlanPage"];
export type ServiceStatistics = Schemas["ServiceStatistics"];
export type ServiceEvent = Schemas["Event"];
export type EventPage = Schemas["EventPage"];
export type Stream = Schemas["Stream"];

export const STREAMS: readonly Stream[] = ["train", "valid", "forward_only"];

type Parameter = string | number | null | undefined;

/** An answer that is no success: `reason` for programs, `message` for people. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly reason: string,
    message: string,
  ) {
    super(message);
  }
}

/** Address of an endpoint, relative to the page: it also works behind a path prefix. Empty parameters are left out. */
export function endpoint(path: string, parameters: Record<string, Parameter> = {}): string {
  const url = new URL(`api/v1/${path}`, document.baseURI);
  url.hash = "";
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, String(value));
  }
  return url.href;
}

/** Path of a job, or of something below it. */
export function jobPath(job: string, rest = ""): string {
  return `jobs/${encodeURIComponent(job)}${rest}`;
}

/** Fetches JSON. Throws `ApiError`, also when the service cannot be reached (status 0). */
export async function get<T>(url: string, signal?: AbortSignal): Promise<T> {
  let response: Response;
  try {
    response = await fetch(url, { headers: { accept: "application/json" }, ...(signal ? { signal } : {}) });
  } catch (cause) {
    if (signal?.aborted) throw cause;
    throw new ApiError(0, "UNREACHABLE", "The scheduler does not answer. Is it still running?");
  }
  const body: unknown = await response.json().catch(() => null);
  if (response.ok) return body as T;
  const error = (body as Partial<Schemas["ErrorEnvelope"]> | null)?.error;
  throw new ApiError(
    response.status,
    error?.reason ?? `HTTP_${response.status}`,
    error?.message ?? `The scheduler answered with status ${response.status}.`,
  );
}
