{{/* Names and labels shared by all objects of the chart. */}}

{{- define "ddpjob.fullname" -}}
{{- .Values.fullnameOverride | default (printf "%s-operator" (.Release.Name | replace "." "-" | trunc 46 | trimSuffix "-")) -}}
{{- end }}

{{- define "ddpjob.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "ddpjob.fullname" .) -}}
{{- else -}}
{{- required "serviceAccount.name: with serviceAccount.create=false it must name the account to use (the namespace's default account must not get the operator's rights)" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{/* Of objects that belong to no namespace: two releases of one name must not share them. */}}
{{- define "ddpjob.clusterName" -}}
{{ .Release.Namespace }}:{{ include "ddpjob.fullname" . }}
{{- end }}

{{- define "ddpjob.leaseName" -}}
{{- .Values.leaseName | default (include "ddpjob.fullname" .) -}}
{{- end }}

{{- define "ddpjob.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
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
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}
