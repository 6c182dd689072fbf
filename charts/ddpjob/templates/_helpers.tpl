{{/* Names and labels shared by all objects of the chart. */}}

{{- define "ddpjob.fullname" -}}
{{- .Values.fullnameOverride | default (printf "%s-operator" (trunc 53 .Release.Name | trimSuffix "-")) -}}
{{- end }}

{{- define "ddpjob.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "ddpjob.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end }}

{{- define "ddpjob.selectorLabels" -}}
app.kubernetes.io/name: ddpjob-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ddpjob.labels" -}}
{{ include "ddpjob.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: ddpjob
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}
