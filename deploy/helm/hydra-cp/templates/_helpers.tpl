{{- define "hydra-cp.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "hydra-cp.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* The JobSet's pods are named <jobset>-workers-0-<index>-<5 random>, which has to stay within 63 characters. */}}
{{- define "hydra-cp.jobset" -}}
{{- printf "%s-train" (include "hydra-cp.fullname" . | trunc 34 | trimSuffix "-") }}
{{- end }}

{{/* The name that JobSet gives the pod of rank 0: <jobset>-<replicated job>-<job>-<pod>.<subdomain>; the subdomain is the JobSet's name. */}}
{{- define "hydra-cp.leader" -}}
{{- printf "%[1]s-leader-0-0.%[1]s" (include "hydra-cp.jobset" .) }}
{{- end }}

{{/* Where the agents find the scheduler. */}}
{{- define "hydra-cp.target" -}}
{{- if eq .Values.mode "sidecar" -}}
{{ include "hydra-cp.leader" . }}:7421
{{- else -}}
{{ include "hydra-cp.fullname" . }}:7421
{{- end }}
{{- end }}

{{- define "hydra-cp.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "hydra-cp.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "hydra-cp.image" -}}
{{ .image.repository }}:{{ default .root.Chart.AppVersion .image.tag }}
{{- end }}

{{/* Selector labels of a component: dict "root" $ "component" NAME */}}
{{- define "hydra-cp.selector" -}}
app.kubernetes.io/name: {{ include "hydra-cp.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "hydra-cp.labels" -}}
{{ include "hydra-cp.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* What every pod has in common, scheduler or trainer: dict "root" $ "pod" VALUES */}}
{{- define "hydra-cp.pod" -}}
serviceAccountName: {{ include "hydra-cp.serviceAccount" .root }}
automountServiceAccountToken: false
# A Service's variables (HYDRACP_…_PORT=tcp://…) would look like settings of ours.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .pod.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "hydra-cp.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{/* The scheduler's container, of the Deployment and of the sidecar alike. */}}
{{- define "hydra-cp.scheduler" -}}
{{- $scheduler := .Values.scheduler -}}
name: scheduler
image: {{ include "hydra-cp.image" (dict "root" . "image" $scheduler.image) }}
imagePullPolicy: {{ $scheduler.image.pullPolicy }}
args: [serve]
env:
  - name: HYDRACP_GRPC
    value: 0.0.0.0:7421
  - name: HYDRACP_HTTP
    value: 0.0.0.0:7422
  - name: HYDRACP_STORE
    value: sqlite:////var/lib/hydra-cp/history.sqlite3
  - name: HYDRACP_GRACE_S
    value: {{ $scheduler.shutdownGraceSeconds | quote }}
  {{- range $name, $value := $scheduler.settings }}
  {{- if not (regexMatch "^[a-z][a-z0-9_]*$" $name) }}
  {{- fail (printf "scheduler.settings: %q is not a name of a setting; write it as in the configuration file, in lower case" $name) }}
  {{- end }}
  {{- if has $name (list "grpc" "http" "store" "grace_s") }}
  {{- fail (printf "scheduler.settings.%s is set by the chart: the probes, the Service and the volumes depend on it" $name) }}
  {{- end }}
  - name: HYDRACP_{{ upper $name }}
    value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
  {{- end }}
  # Compiled code goes to a writable place: the root file system is read-only.
  - name: NUMBA_CACHE_DIR
    value: /var/cache/numba
ports:
  - name: grpc
    containerPort: 7421
    protocol: TCP
  - name: http
    containerPort: 7422
    protocol: TCP
# The empty service name says "alive", the planner's "warm": its code is compiled at the first start, hence the long start-up.
startupProbe:
  grpc:
    port: 7421
    service: hydracp.v1.PlannerService
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
readinessProbe:
  grpc:
    port: 7421
    service: hydracp.v1.PlannerService
  periodSeconds: 10
  timeoutSeconds: 5
livenessProbe:
  grpc:
    port: 7421
    service: ""
  periodSeconds: 20
  timeoutSeconds: 10
resources: {{- toYaml $scheduler.resources | nindent 2 }}
{{ include "hydra-cp.containerSecurity" . }}
volumeMounts:
  - name: history
    mountPath: /var/lib/hydra-cp
  - name: scheduler-cache
    mountPath: /var/cache/numba
  - name: scheduler-tmp
    mountPath: /tmp
{{- end }}

{{- define "hydra-cp.schedulerVolumes" -}}
- name: history
  {{- if .Values.scheduler.history.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.scheduler.history.existingClaim }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.scheduler.history.sizeLimit }}
  {{- end }}
- name: scheduler-cache
  emptyDir: {}
- name: scheduler-tmp
  emptyDir: {}
{{- end }}
