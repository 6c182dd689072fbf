{{/*
Schema of spec.template: a bounded skeleton of PodTemplateSpec. CEL sees what is typed here;
everything else of a pod is kept as written and checked by the API server at the first pod.
*/}}
{{- define "ddpjob.crd.template" -}}
description: >-
  Pod template of every replica, with every field of a Kubernetes PodTemplateSpec. The container
  named "trainer", or the only one, trains; the others are sidecars, which do not decide whether a
  replica succeeded. It may change only while the job is suspended. As JSON at most 128 KiB and 50
  levels; a longer one shows as condition Invalid.
type: object
required: [spec]
properties:
  metadata:
    description: Labels and annotations of the pods.
    type: object
    properties:
      labels:
        description: Labels of the pods. Keys that start with ddpjob.dev/ belong to the operator.
        type: object
        maxProperties: 128
        x-kubernetes-validations:
          - rule: "self.all(k, !k.startsWith('ddpjob.dev/'))"
            message: >-
              label keys that start with ddpjob.dev/ belong to the operator: remove them from
              spec.template.metadata.labels
        additionalProperties: {type: string, maxLength: 63}
      annotations:
        description: >-
          Annotations of the pods. Keys that start with ddpjob.dev/ belong to the operator.
        type: object
        maxProperties: 128
        x-kubernetes-validations:
          - rule: "self.all(k, !k.startsWith('ddpjob.dev/'))"
            message: >-
              annotation keys that start with ddpjob.dev/ belong to the operator: remove them
              from spec.template.metadata.annotations
        additionalProperties: {type: string, maxLength: 262144}  # what Kubernetes allows for all
      creationTimestamp:
        description: Ignored. Accepted because client libraries write it as null.
        type: string
        nullable: true
        maxLength: 64
  spec:
    description: >-
      Pod spec. ddpjob reads the fields below; Kubernetes checks the others at the first pod: an
      unknown one shows as condition Invalid.
    type: object
    required: [containers]
    x-kubernetes-preserve-unknown-fields: true
    x-kubernetes-validations:
      - rule: "!has(self.restartPolicy) || self.restartPolicy == 'Never'"
        fieldPath: .restartPolicy
        message: >-
          spec.template.spec.restartPolicy must be Never or left out: the operator restarts
          the whole gang, see spec.restart
      - rule: "!has(self.hostname)"
        fieldPath: .hostname
        message: >-
          spec.template.spec.hostname is set by the operator (<job>-<replica>): remove it
      - rule: "!has(self.subdomain)"
        fieldPath: .subdomain
        message: >-
          spec.template.spec.subdomain is set by the operator (<job>): remove it
      - rule: size(self.containers) == 1 || self.containers.exists(c, c.name == 'trainer')
        fieldPath: .containers
        message: >-
          spec.template.spec.containers: of several containers the one that trains must be named
          trainer: rename it
      - rule: >-
          !has(self.initContainers) ||
          self.initContainers.all(i, !self.containers.exists(c, c.name == i.name))
        fieldPath: .initContainers
        message: >-
          spec.template.spec.initContainers: a container name is used twice: names must be
          unique among initContainers and containers
    properties:
      containers:
        description: >-
          Containers of the pod. The one named "trainer" trains, or the only one.
        type: array
        minItems: 1
        maxItems: 32
        x-kubernetes-list-type: map
        x-kubernetes-list-map-keys: [name]
        items:
          {{- include "ddpjob.crd.container" (dict "kind" "container") | nindent 10 }}
      initContainers:
        description: >-
          Containers that end before the others start. With restartPolicy Always it is a native
          sidecar: it runs beside the trainer and ends with the pod. All have the rendezvous
          variables.
        type: array
        maxItems: 32
        x-kubernetes-list-type: map
        x-kubernetes-list-map-keys: [name]
        items:
          {{- include "ddpjob.crd.container" (dict "kind" "initContainer") | nindent 10 }}
      volumes:
        description: >-
          Volumes of the pod. Names that start with ddpjob- belong to the operator.
        type: array
        maxItems: 128
        x-kubernetes-list-type: map
        x-kubernetes-list-map-keys: [name]
        items:
          type: object
          required: [name]
          x-kubernetes-preserve-unknown-fields: true
          x-kubernetes-validations:
            - rule: "!self.name.startsWith('ddpjob-')"
              fieldPath: .name
              message: >-
                volume names that start with ddpjob- belong to the operator: choose another
                name
          properties:
            name:
              description: Name of the volume, a DNS label.
              type: string
              minLength: 1
              maxLength: 63
      restartPolicy:
        description: Never, or left out. The operator sets Never.
        type: string
        maxLength: 32
      terminationGracePeriodSeconds:
        description: >-
          Seconds between SIGTERM and SIGKILL, in which the trainer saves a snapshot; 30 when left
          out.
        type: integer
        format: int64
        minimum: 0
        maximum: 2592000
        x-kubernetes-validations:
          - rule: self >= 1
            message: >-
              spec.template.spec.terminationGracePeriodSeconds must be at least 1: with 0 a pod is
              gone from the API while its processes still run, and the next attempt would train
              beside them
      priorityClassName:
        description: PriorityClass of the pods; spec.scheduling.priorityClassName is the other place.
        type: string
        maxLength: 253
      hostname:
        description: Not supported; set by the operator to <job>-<replica>.
        type: string
        maxLength: 253
      subdomain:
        description: Not supported; set by the operator to <job>.
        type: string
        maxLength: 253
{{- end }}
