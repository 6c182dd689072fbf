{{/* Names and labels shared by all objects of the chart. */}}

{{- define "ddpjob.fullname" -}}
{{- $name := .Values.nameOverride | default "operator" -}}
{{- $release := .Release.Name | replace "." "-" | trunc (int (sub 54 (len $name))) | trimSuffix "-" -}}
{{- .Values.fullnameOverride | default (printf "%s-%s" $release $name) -}}
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
{{- fail "serviceAccount.name: the namespace's default account must not get the operator's rights, which every pod that names no account would have then; give the operator its own" -}}
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

{{/* A repository names its registry where its first part has a dot or a port, or is localhost. */}}
{{- define "ddpjob.image" -}}
{{- $repository := .Values.image.repository -}}
{{- $registry := (.Values.global | default dict).imageRegistry | default "" | trimSuffix "/" -}}
{{- if and $registry (not (regexMatch "^([^/]*[.:][^/]*|localhost)/" $repository)) -}}
{{- $repository = printf "%s/%s" $registry $repository -}}
{{- end -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* Those of all charts are names, or as ours. */}}
{{- define "ddpjob.pullSecrets" -}}
{{- $all := .Values.image.pullSecrets | default list -}}
{{- range (.Values.global | default dict).imagePullSecrets -}}
{{- $all = append $all (ternary (dict "name" .) . (kindIs "string" .)) -}}
{{- end -}}
{{- with uniq $all -}}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end }}

{{/* What no object can show: refused before any is made. */}}
{{- define "ddpjob.check" -}}
{{- if not .Values.enabled -}}
{{- fail "enabled=false: only an umbrella chart's `condition` leaves this chart out; to remove a release of this chart itself, run helm uninstall" -}}
{{- end -}}
{{- /* Who may make no cluster-wide object may perhaps read no namespace, which would end the install. */}}
{{- range ternary .Values.namespaces list .Values.crds.enabled -}}
{{- /* `helm template` looks nowhere, and finds no namespace at all. */}}
{{- if and (not (lookup "v1" "Namespace" "" .)) (lookup "v1" "Namespace" "" "default") -}}
{{- fail (printf "namespaces: %s is not there: kubectl create namespace %s, or leave it out" . .) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "ddpjob.selectorLabels" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default "ddpjob-operator" | quote }}
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

{{/* Where the policies about jobs and gangs hold: elsewhere another release has its own rules. */}}
{{- define "ddpjob.servedNamespaces" -}}
{{- with .Values.namespaces -}}
matchResources:
  namespaceSelector:
    matchExpressions:
      - {key: kubernetes.io/metadata.name, operator: In, values: {{ toJson . }}}
{{- end }}
{{- end }}
