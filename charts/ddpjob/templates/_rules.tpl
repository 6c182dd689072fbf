{{/*
What the operator may do, verb by verb. kopf needs no more: its scanning of definitions and
namespaces is off, and discovery is open to every ServiceAccount.
*/}}
{{- define "ddpjob.rules" -}}
# delete: spec.ttlSecondsAfterFinished
- apiGroups: [ddpjob.dev]
  resources: [ddpjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [ddpjob.dev]
  resources: [ddpjobs/status]
  verbs: [update]
# Asked for by blockOwnerDeletion where OwnerReferencesPermissionEnforcement is on.
- apiGroups: [ddpjob.dev]
  resources: [ddpjobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, create, update]
# One a job, named after its uid; none is ever read.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, update]
{{- $versions := .Capabilities.APIVersions }}
{{- $served := or ($versions.Has "scheduling.k8s.io/v1beta1/PodGroup") ($versions.Has "scheduling.k8s.io/v1alpha2/PodGroup") }}
{{- if or (eq .Values.rbac.podGroups "Always") (and $served (eq .Values.rbac.podGroups "Auto")) }}
# list: to remove those of earlier attempts
- apiGroups: [scheduling.k8s.io]
  resources: [podgroups]
  verbs: [get, list, create, delete]
{{- end }}
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- if .Values.kueue.enabled }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [update]
{{- end }}
{{- end }}

{{/* Nodes are of no namespace: a Role cannot give these. For spec.nodeLost. */}}
{{- define "ddpjob.nodeRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, list, watch]
{{- end }}
