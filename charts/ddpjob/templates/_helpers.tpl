{{/* Names and labels shared by all objects of the chart. */}}

{{- define "ddpjob.fullname" -}}
{{- .Values.fullnameOverride | default (printf "%s-operator" (.Release.Name | replace "." "-" | trunc 46 | trimSuffix "-")) -}}
{{- end }}

{{/* Never the namespace's default account: every pod there that names none would have the operator's rights. */}}
{{- define "ddpjob.serviceAccountName" -}}
{{- $name := .Values.serviceAccount.name -}}
{{- if .Values.serviceAccount.create -}}
{{- $name = $name | default (include "ddpjob.fullname" .) -}}
{{- end -}}
{{- if not $name -}}
{{- fail "serviceAccount.name: with serviceAccount.create=false it must name the account to use (the namespace's default account must not get the operator's rights)" -}}
{{- else if eq $name "default" -}}
{{- fail "serviceAccount.name: the namespace's default account must not get the operator's rights, which every pod that names no account would have then; give the operator one of its own" -}}
{{- end -}}
{{- $name -}}
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
app.kubernetes.io/instance: {{ .Release.Name | quote }}
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

{{/* Call with (list $ .Values.some.labels): ours and theirs, each key once; theirs win. */}}
{{- define "ddpjob.labelsWith" -}}
{{- toYaml (merge (dict) (index . 1 | default dict) (include "ddpjob.labels" (index . 0) | fromYaml)) -}}
{{- end }}

{{/*
"true" where the operator's account is bound by a policy. Auto: not where the API server of this install serves none.
`helm template` asks none and knows no kinds, not even pods: there every version that the chart supports serves it.
*/}}
{{- define "ddpjob.operatorPolicy" -}}
{{- $served := .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy" -}}
{{- $unasked := not (.Capabilities.APIVersions.Has "v1/Pod") -}}
{{- $enabled := toString .Values.admissionPolicies.operator.enabled -}}
{{- or (eq $enabled "true") (and (eq $enabled "Auto") (or $served $unasked)) -}}
{{- end }}

{{/* Where the policies about jobs and gangs hold: elsewhere another release has rules of its own. */}}
{{- define "ddpjob.servedNamespaces" -}}
{{- with .Values.namespaces -}}
matchResources:
  namespaceSelector:
    matchExpressions:
      - {key: kubernetes.io/metadata.name, operator: In, values: {{ toJson . }}}
{{- end }}
{{- end }}
