{{/*
Schema of one container of spec.template: only what the rules and the operator look at.
Every other field of a Kubernetes container is kept as written.
Call with (dict "kind" "container" | "initContainer").
*/}}
{{- define "ddpjob.crd.container" -}}
type: object
required: [name]
x-kubernetes-preserve-unknown-fields: true
x-kubernetes-validations:
  {{- if eq .kind "initContainer" }}
  - rule: "!has(self.restartPolicy) || self.restartPolicy == 'Always'"
    fieldPath: .restartPolicy
    message: >-
      restartPolicy of an init container must be Always, which makes it a native sidecar, or
      left out
  {{- else }}
  - rule: "!has(self.restartPolicy)"
    fieldPath: .restartPolicy
    message: >-
      restartPolicy of a container is not supported: remove it; the operator restarts the
      gang, see spec.restart
  {{- end }}
  - rule: "!has(self.restartPolicyRules)"
    fieldPath: .restartPolicyRules
    message: >-
      restartPolicyRules of a container are not supported: remove them and use
      spec.restart.rules
properties:
  name:
    description: Name of the container, a DNS label, unique in the pod.
    type: string
    minLength: 1
    maxLength: 63
    pattern: ^[a-z0-9]([-a-z0-9]*[a-z0-9])?$
  image:
    description: Image to run.
    type: string
    maxLength: 1024
  command:
    description: Entry point, as an array. The image's own is used when it is left out.
    type: array
    maxItems: 1024
    items: {type: string, maxLength: 131072}  # Linux takes no longer one
  args:
    description: Arguments of the entry point.
    type: array
    maxItems: 1024
    items: {type: string, maxLength: 131072}  # Linux takes no longer one
  env:
    description: >-
      Environment variables. Those that ddpjob sets (rendezvous, ranks and every DDPJOB_ name but
      DDPJOB_TRAINER_ SNAPSHOT_UPLOAD, EVENTS and TENSORBOARD) are refused.
    type: array
    maxItems: 512
    items:
      type: object
      required: [name]
      x-kubernetes-preserve-unknown-fields: true
      x-kubernetes-validations:
        # Held equal to RESERVED_ENV, USER_ENV and OWN_PREFIX of ddpjob_contract by a test.
        - rule: >-
            (!self.name.startsWith('DDPJOB_') || self.name in ['DDPJOB_TRAINER_SNAPSHOT_UPLOAD',
            'DDPJOB_TRAINER_EVENTS', 'DDPJOB_TRAINER_TENSORBOARD', 'DDPJOB_TRAINER_RESCUE'])
            && !(self.name in [
            'MASTER_ADDR', 'MASTER_PORT', 'PET_NNODES', 'PET_NPROC_PER_NODE', 'PET_NODE_RANK',
            'PET_MASTER_ADDR', 'PET_MASTER_PORT', 'PET_RDZV_ID',
            'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK'])
          fieldPath: .name
          message: >-
            this environment variable is set by ddpjob itself: remove it from the template
          messageExpression: >-
            'environment variable ' + self.name +
            ' is set by ddpjob itself: remove it from the template'
      properties:
        name:
          description: Name of the variable.
          type: string
          minLength: 1
          maxLength: 256
        value:
          description: Its value, at most 128 KiB as in Linux; numbers need quotes.
          type: string
          nullable: true
          maxLength: 131072
  ports:
    description: Ports that the container listens on. Informational, as in any pod.
    type: array
    maxItems: 64
    items:
      type: object
      required: [containerPort]
      x-kubernetes-preserve-unknown-fields: true
      properties:
        containerPort:
          description: Port number, 1 to 65535.
          type: integer
          format: int32
          minimum: 1
          maximum: 65535
  resources:
    description: What the container asks for, as in any pod.
    type: object
    x-kubernetes-preserve-unknown-fields: true
    properties:
      limits:
        description: The most that the container gets.
        type: object
        x-kubernetes-preserve-unknown-fields: true
        properties:
          nvidia.com/gpu:
            description: GPUs of the container, and of nprocPerNode auto.
            x-kubernetes-int-or-string: true
            maxLength: 20
          {{- include "ddpjob.crd.quantities" . | nindent 10 }}
      requests:
        description: What the scheduler keeps free for the container.
        type: object
        x-kubernetes-preserve-unknown-fields: true
        properties:
          {{- include "ddpjob.crd.quantities" . | nindent 10 }}
  volumeMounts:
    description: Volumes mounted into the container.
    type: array
    maxItems: 128
    items:
      type: object
      required: [name, mountPath]
      x-kubernetes-preserve-unknown-fields: true
      x-kubernetes-validations:
        - rule: "!self.name.startsWith('ddpjob-')"
          fieldPath: .name
          message: >-
            volume names that start with ddpjob- belong to the operator: choose another name
      properties:
        name:
          description: Name of a volume of the pod.
          type: string
          maxLength: 63
        mountPath:
          description: Where it is mounted.
          type: string
          maxLength: 1024
  restartPolicy:
    description: >-
      Only for an init container: Always makes it a native sidecar.
    type: string
    maxLength: 32
  restartPolicyRules:
    description: Not supported; refused.
    type: array
    maxItems: 32
    items:
      type: object
      x-kubernetes-preserve-unknown-fields: true
{{- end }}

{{/* Numbers stay what they are (cpu: 0.5); a word must be a quantity, or the API server's own error names no field. */}}
{{- define "ddpjob.crd.quantities" -}}
{{- range list "cpu" "memory" "ephemeral-storage" }}
{{ . }}:
  description: A quantity, such as 500m, 2 or 16Gi.
  x-kubernetes-preserve-unknown-fields: true
  maxLength: 64
  pattern: ^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$
{{- end }}
{{- end }}
