{{/* Schema of spec, with its bounds, defaults and rules. */}}

{{- define "ddpjob.crd.spec" -}}
description: What to run, and what to do when a member is lost.
type: object
required: [replicas, template]
x-kubernetes-validations:
  - rule: has(self.snapshot) == has(oldSelf.snapshot)
    fieldPath: .snapshot
    message: >-
      spec.snapshot is immutable and can be neither added nor removed: create a new DDPJob
  # Both ways round: the API server's == overlooks a field that only its right side has when
  # it has no type here. Where neither side's field has one (nodeName for schedulerName), the
  # operator's templateHash still sees the change.
  - rule: >-
      self.suspend || oldSelf.suspend ||
      (self.template == oldSelf.template && oldSelf.template == self.template)
    fieldPath: .template
    message: >-
      spec.template may change only while the job is suspended: set spec.suspend to true
      first, or create a new DDPJob
  - rule: self.port != self.metrics.port
    fieldPath: .metrics
    message: >-
      spec.metrics.port must differ from spec.port: both are opened in the same pod
  - rule: >-
      self.template.spec.containers.all(c,
      c.name == (self.template.spec.containers.exists(t, t.name == 'trainer')
      ? 'trainer' : self.template.spec.containers[0].name)
      || !has(c.ports)
      || c.ports.all(p, p.containerPort != self.port && p.containerPort != self.metrics.port))
      && (!has(self.template.spec.initContainers) || self.template.spec.initContainers.all(c,
      !has(c.restartPolicy) || !has(c.ports)
      || c.ports.all(p, p.containerPort != self.port && p.containerPort != self.metrics.port)))
    fieldPath: .template
    message: >-
      a sidecar of spec.template declares a containerPort equal to spec.port or
      spec.metrics.port, which the trainer opens: change one of them
  - rule: >-
      !has(self.snapshot) || self.template.spec.containers.all(c,
      c.name != (self.template.spec.containers.exists(t, t.name == 'trainer')
      ? 'trainer' : self.template.spec.containers[0].name)
      || !has(c.volumeMounts)
      || c.volumeMounts.all(m, m.mountPath != self.snapshot.path
      && m.mountPath != self.snapshot.path + '/'))
    fieldPath: .snapshot
    message: >-
      spec.snapshot.path is also a mountPath of the trainer container in spec.template: the
      operator mounts spec.snapshot.volume there; remove that mount or change the path
  # The name of the limit is nvidia.com/gpu, as CEL has to write it. Kubernetes 1.30 takes an
  # int-or-string for three megabytes, whatever its maxLength: no rule may match or convert it.
  - rule: >-
      type(self.nprocPerNode) != int || self.template.spec.containers.all(c,
      c.name != (self.template.spec.containers.exists(t, t.name == 'trainer')
      ? 'trainer' : self.template.spec.containers[0].name)
      || !has(c.resources) || !has(c.resources.limits)
      || !has(c.resources.limits.nvidia__dot__com__slash__gpu)
      || (type(c.resources.limits.nvidia__dot__com__slash__gpu) == string
      && !(c.resources.limits.nvidia__dot__com__slash__gpu in
      ['{{ join "', '" (untilStep 1 64 1) }}']))
      || int(c.resources.limits.nvidia__dot__com__slash__gpu) < 1
      || int(c.resources.limits.nvidia__dot__com__slash__gpu) >= self.nprocPerNode)
    fieldPath: .nprocPerNode
    message: >-
      spec.nprocPerNode is more than the limit nvidia.com/gpu of the trainer container in
      spec.template, and each process needs its own GPU: leave it out (auto) or raise the limit
  - rule: >-
      self.standby == 0 || (self.replicas > 1 && self.restart.maxRestarts > 0
      && self.restart.inPlace.enabled && self.restart.replaceSeconds > 0)
    fieldPath: .standby
    message: >-
      spec.standby needs at least 2 replicas, and spec.restart with inPlace.enabled, maxRestarts
      and replaceSeconds of at least 1: without them no pod ever takes another one's place
  - rule: >-
      self.scheduling.priorityClassName == '' || !has(self.template.spec.priorityClassName)
      || self.template.spec.priorityClassName in ['', self.scheduling.priorityClassName]
    fieldPath: .scheduling
    message: >-
      spec.scheduling.priorityClassName differs from that of spec.template.spec, and all pods have
      the same: remove one
  - rule: self.nodeLost.policy != 'Fence' || has(self.snapshot)
    fieldPath: .nodeLost
    message: >-
      spec.nodeLost.policy Fence needs spec.snapshot: only the snapshot lineage shuts out a
      pod that lives on behind a lost node; set spec.snapshot or use Wait
properties:
  replicas:
    description: Pods in the gang, 1 to 10000. Immutable.
    type: integer
    format: int32
    minimum: 1
    maximum: 10000
    x-kubernetes-validations:
      - rule: self == oldSelf
        message: "spec.replicas is immutable: create a new DDPJob"
  standby:
    description: >-
      Standby pods beyond replicas, 0 to 64. When a pod other than replica 0's is lost, one takes
      its place at once, and the new pod becomes a standby. They hold a pod's resources. Needs our
      launcher, inPlace and replaceSeconds. Immutable.
    type: integer
    format: int32
    minimum: 0
    maximum: 64
    default: 0
    x-kubernetes-validations:
      - rule: self == oldSelf
        message: "spec.standby is immutable: create a new DDPJob"
  standbyPriorityClassName:
    description: >-
      PriorityClass of the standby pods, in place of the template's, so that other work may
      preempt them. A standby that serves keeps it. Immutable.
    type: string
    maxLength: 253
    pattern: ^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$
    default: ""
    x-kubernetes-validations:
      - rule: self == oldSelf
        message: "spec.standbyPriorityClassName is immutable: create a new DDPJob"
  scheduling:
    description: How Kubernetes finds nodes for the pods. Immutable.
    type: object
    # Written out: rules are checked against this value before nested defaults are set.
    default: {gang: Auto, topologyKey: "", priorityClassName: ""}
    x-kubernetes-validations:
      - rule: self == oldSelf
        message: "spec.scheduling is immutable: create a new DDPJob"
      - rule: self.gang != 'None' || self.topologyKey == ''
        fieldPath: .topologyKey
        message: >-
          spec.scheduling.topologyKey needs a PodGroup, and gang None makes none: remove one
    properties:
      gang:
        description: >-
          Whether a PodGroup of Kubernetes (1.36 and later, with feature gates) places all pods of
          an attempt at once or none. Auto: where the API server has it; else pods are placed one
          by one, and released if not all find room. Native: the job waits for it. None: one by
          one.
        type: string
        enum: [Auto, Native, None]
        default: Auto
      topologyKey:
        description: >-
          Label of nodes, for example topology.kubernetes.io/rack: all pods go to nodes with the
          same value. Needs a PodGroup, also with Auto.
        type: string
        maxLength: 317
        pattern: ^(([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$
        default: ""
      priorityClassName:
        description: >-
          PriorityClass of the pods and their PodGroup, in place of the template's
          priorityClassName.
        type: string
        maxLength: 253
        pattern: ^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$
        default: ""
  nprocPerNode:
    description: >-
      Training processes per pod: 1 to 64, or "auto": the limit nvidia.com/gpu (or amd.com/gpu,
      gpu.intel.com/xe, gpu.intel.com/i915) of the trainer container, else 1. MIG slices and
      ResourceClaims are not counted. Immutable.
    x-kubernetes-int-or-string: true
    default: auto
    x-kubernetes-validations:
      - rule: "type(self) == int ? (self >= 1 && self <= 64) : string(self) == 'auto'"
        message: >-
          spec.nprocPerNode must be a number from 1 to 64 (without quotes) or "auto"
      - rule: self == oldSelf
        message: "spec.nprocPerNode is immutable: create a new DDPJob"
  template:
    {{- include "ddpjob.crd.template" . | nindent 4 }}
  port:
    description: >-
      Port of the rendezvous on replica 0 (MASTER_PORT), 1024 to 65535. With hostNetwork the
      default means a port from 20000 to 24999, drawn again for each attempt. Immutable.
    type: integer
    format: int32
    minimum: 1024
    maximum: 65535
    default: 29500
    x-kubernetes-validations:
      - rule: self == oldSelf
        message: "spec.port is immutable: create a new DDPJob"
  suspend:
    description: >-
      true removes the pods and keeps the job; false starts a new attempt from the newest
      snapshot. Costs no restart.
    type: boolean
    default: false
  restart:
    description: When and how often the gang restarts.
    type: object
    default: {}
    x-kubernetes-validations:
      - rule: "!has(self.resumeWhen) || (has(self.resumeArgs) && self.resumeArgs.size() > 0)"
        fieldPath: .resumeWhen
        message: >-
          spec.restart.resumeWhen needs spec.restart.resumeArgs: what the program gets where one is
          there
      - rule: >-
          has(self.resumeWhen) || !has(self.resumeArgs)
          || !self.resumeArgs.exists(word, word.contains('{newest}'))
        fieldPath: .resumeArgs
        message: >-
          spec.restart.resumeArgs: {newest} needs spec.restart.resumeWhen, the checkpoints of which
          it is the newest, for example checkpoints/*.pt
    properties:
      maxRestarts:
        description: >-
          Restarts allowed for failures of the program; the next failure ends the job. Progress (a
          newer committed snapshot, or a newer file at progressPath) and healAfterSeconds without
          a failure reset the count. 0 means none.
        type: integer
        format: int32
        minimum: 0
        maximum: 10000
        default: 3
      maxDisruptions:
        description: >-
          Restarts allowed for causes outside the program (eviction, preemption, drain, lost
          node). Reset as maxRestarts is.
        type: integer
        format: int32
        minimum: 0
        maximum: 1000000
        default: 100
      backoff:
        description: >-
          Delay between restarts. The first restart is immediate, then initialSeconds, doubling up
          to maxSeconds. An attempt that fails before it reports a step waits 300 s, not
          initialSeconds, before the second.
        type: object
        # Written out: rules are checked against this value before nested defaults are set.
        default: {initialSeconds: 1, maxSeconds: 300}
        x-kubernetes-validations:
          - rule: self.initialSeconds <= self.maxSeconds
            message: >-
              spec.restart.backoff.initialSeconds must not be greater than maxSeconds
        properties:
          initialSeconds:
            description: Seconds before the second restart.
            type: integer
            format: int32
            minimum: 1
            maximum: 86400
            default: 1
          maxSeconds:
            description: Most seconds before any restart.
            type: integer
            format: int32
            minimum: 1
            maximum: 86400
            default: 300
      inPlace:
        description: >-
          Restart in place: when a process fails, all processes of the gang restart and the pods
          stay. Needs our launcher (ddpjob-trainer run). Costs no restart; off when maxRestarts is
          0. A change holds from the next attempt on.
        type: object
        default: {}
        properties:
          enabled:
            description: Whether processes may be restarted in place.
            type: boolean
            default: true
          maxWithoutProgress:
            description: >-
              Restarts in place allowed in a row without progress; the next failure ends the
              attempt. Progress is what resets maxRestarts.
            type: integer
            format: int32
            minimum: 1
            maximum: 1000
            default: 3
          drill:
            description: >-
              Whether a run with snapshots is restarted in place early, after its first snapshot
              and after the first that holds an epoch's end, to check that it resumes bit for bit.
              Costs no restart. Auto leaves it out if the start took longer than a minute.
            type: string
            enum: [Auto, Always, Never]
            default: Auto
      replaceSeconds:
        description: >-
          When a pod is lost, the others keep their pods and wait this long for its replacement;
          then all pods restart. 0: all pods restart at once. Needs our launcher and inPlace. A
          change holds for later pods.
        type: integer
        format: int32
        minimum: 0
        maximum: 86400
        default: 300
      healAfterSeconds:
        description: >-
          Seconds without a failure, of a process either, that reset maxRestarts, maxDisruptions
          and maxWithoutProgress: for programs whose checkpoints the operator cannot see. 0: never
          by time.
        type: integer
        format: int32
        minimum: 0
        maximum: 31536000
        default: 3600
      progressPath:
        description: >-
          File or directory in the trainer container that the program writes as it advances, such
          as its checkpoints; * in the last part matches any characters. A newer time of
          modification, in a directory of any file down to three levels, is progress: leave out
          what every start writes, such as logs. A change holds for later pods.
        type: string
        minLength: 2
        maxLength: 512
        x-kubernetes-validations:
          - rule: >-
              self.startsWith('/') && !self.endsWith('/') && !self.contains('//')
              && !self.contains('$(') && !self.matches('[*].*/') && !self.split('/').exists(p, p == '.' || p == '..')
              && !self.matches('[\\x00-\\x1f\\x7f]')
            message: >-
              spec.restart.progressPath must be an absolute path of a file or directory other than
              "/", without "//", "." or ".." parts, "$(", control characters, a final "/" and "*"
              before the last part, for example /data/checkpoints or /data/out/checkpoint-*
          - rule: "!self.matches('^/(dev|proc|sys)(/|$)')"
            message: >-
              spec.restart.progressPath must not lie in /dev, /proc or /sys: name what the program
              writes, for example /data/checkpoints
      resumeArgs:
        description: >-
          Arguments with which a program resumes its checkpoint, in every start but the job's
          first: for example ["--resume", "{newest}"], where {newest} is the newest match of
          resumeWhen. A change holds for later pods.
        type: array
        maxItems: 32
        x-kubernetes-list-type: atomic
        items:
          type: string
          maxLength: 1024
        x-kubernetes-validations:
          - rule: "!self.exists(word, word.contains('$'))"
            message: >-
              spec.restart.resumeArgs must not contain "$": nothing is put in its place
      resumeWhen:
        description: >-
          Glob of the program's checkpoints: files or non-empty directories, below the working
          directory or absolute, on a volume that outlives the pod, for example checkpoints/*.pt.
          Without a match the program starts without resumeArgs. Unset: resumeArgs need no
          checkpoint.
        type: string
        minLength: 1
        maxLength: 512
        x-kubernetes-validations:
          - rule: "!self.contains('$')"
            message: >-
              spec.restart.resumeWhen must not contain "$": nothing is put in its place
      rules:
        description: >-
          Exceptions from the usual treatment of failures. The first rule that matches wins.
        type: array
        maxItems: 32
        x-kubernetes-list-type: atomic
        items:
          type: object
          required: [action]
          x-kubernetes-validations:
            - rule: has(self.exitCodes) != has(self.reasons)
              message: >-
                a rule in spec.restart.rules needs exactly one of exitCodes and reasons
          properties:
            exitCodes:
              description: >-
                Exit codes of the trainer container, 1 to 255; 128+n is death by signal n.
              type: array
              minItems: 1
              maxItems: 255
              x-kubernetes-list-type: set
              items:
                type: integer
                format: int32
                minimum: 1
                maximum: 255
            reasons:
              description: >-
                Reasons of Kubernetes: of the container's end (OOMKilled, Error, StartError), of
                the pod (Evicted, NodeLost) or of its DisruptionTarget condition
                (PreemptionByScheduler, EvictionByEvictionAPI).
              type: array
              minItems: 1
              maxItems: 64
              x-kubernetes-list-type: set
              items:
                type: string
                minLength: 1
                maxLength: 64
                pattern: ^[A-Za-z][A-Za-z0-9]*$
            action:
              description: >-
                Restart: charged to maxRestarts. RestartFree: charged to maxDisruptions. Fail:
                the job fails at once.
              type: string
              enum: [Restart, RestartFree, Fail]
  snapshot:
    description: Where training state is kept. Without it a restart begins at step 0. Immutable.
    type: object
    required: [path, volume]
    x-kubernetes-validations:
      # Both ways round, as for the template.
      - rule: self == oldSelf && oldSelf == self
        message: "spec.snapshot is immutable: create a new DDPJob"
      - rule: >-
          self.path.startsWith('/') && self.path != '/' && !self.path.endsWith('/')
          && !self.path.contains(':') && !self.path.contains('//') && !self.path.contains('$')
          && !self.path.split('/').exists(p, p == '.' || p == '..')
          && !self.path.matches('[\\x00-\\x1f\\x7f]')
        fieldPath: .path
        message: >-
          spec.snapshot.path must be an absolute directory other than "/", without ":", "//",
          "$", control characters, "." or ".." parts and without a final "/", for example /snapshots
      - rule: "!self.path.matches('^/(dev|proc|sys)(/|$)')"
        fieldPath: .path
        message: >-
          spec.snapshot.path must not lie in /dev, /proc or /sys: use for example /snapshots
      - rule: >-
          !has(self.volume.persistentVolumeClaim) ||
          !has(self.volume.persistentVolumeClaim.readOnly) ||
          !self.volume.persistentVolumeClaim.readOnly
        fieldPath: .volume
        message: >-
          spec.snapshot.volume.persistentVolumeClaim.readOnly must be false or left out:
          snapshots are written there
    properties:
      path:
        description: >-
          Directory in the trainer container where the volume is mounted. Snapshots go to
          <path>/<job name> (DDPJOB_SNAPSHOT_DIR).
        type: string
        minLength: 1
        maxLength: 512
      volume:
        description: >-
          Volume of one type, written as in a pod but without a name, at most 16 KiB as JSON. All
          replicas must see the same files: usually a ReadWriteMany persistentVolumeClaim.
        type: object
        minProperties: 1
        maxProperties: 1
        x-kubernetes-preserve-unknown-fields: true
        properties:
          persistentVolumeClaim:
            description: A claim in the job's namespace.
            type: object
            required: [claimName]
            properties:
              claimName:
                description: Name of the PersistentVolumeClaim.
                type: string
                minLength: 1
                maxLength: 253
              readOnly:
                description: Must be false or left out.
                type: boolean
          # All are named, so that a change from one to another is seen and null is refused; they
          # may hold what Kubernetes lets them hold.
          nfs:
            description: A directory of an NFS server.
            type: object
            x-kubernetes-preserve-unknown-fields: true
          csi:
            description: A volume of a CSI driver.
            type: object
            x-kubernetes-preserve-unknown-fields: true
          hostPath:
            description: A directory of the node; all nodes must have the same files there.
            type: object
            x-kubernetes-preserve-unknown-fields: true
          ephemeral:
            description: A claim for each pod, which is lost with the pod.
            type: object
            x-kubernetes-preserve-unknown-fields: true
          emptyDir:
            description: A directory for each pod, which is lost with the pod.
            type: object
            x-kubernetes-preserve-unknown-fields: true
          {{- range list "awsElasticBlockStore" "azureDisk" "azureFile" "cephfs" "cinder" "configMap"
            "downwardAPI" "fc" "flexVolume" "flocker" "gcePersistentDisk" "gitRepo" "glusterfs" "image"
            "iscsi" "photonPersistentDisk" "portworxVolume" "projected" "quobyte" "rbd" "scaleIO"
            "secret" "storageos" "vsphereVolume" }}
          {{ . }}:
            description: As in a pod.
            type: object
            x-kubernetes-preserve-unknown-fields: true
          {{- end }}
      everySteps:
        description: >-
          Steps between snapshots, or Auto: as many snapshots as pause training for under 1 % of
          the time.
        x-kubernetes-int-or-string: true
        default: Auto
        x-kubernetes-validations:
          - rule: "type(self) == int ? (self >= 1 && self <= 1000000000) : string(self) == 'Auto'"
            message: spec.snapshot.everySteps must be Auto or a number from 1 to 1000000000
      keep:
        description: >-
          Newest snapshots to keep (DDPJOB_SNAPSHOT_KEEP), at least two, counting only those that
          another rank has read back. The newest two of each earlier job stay too.
        type: integer
        format: int32
        minimum: 1
        maximum: 10000
        default: 3
      resume:
        description: >-
          Auto continues from the newest valid snapshot under the path. Never starts a new DDPJob
          at step 0.
        type: string
        enum: [Auto, Never]
        default: Auto
  hang:
    description: >-
      Time without progress after which our launcher ends a process (exit code 76) and a restart
      follows. All but outputSeconds need our library or an adapter. A change holds for later
      pods.
    type: object
    default: {}
    properties:
      startupSeconds:
        description: Seconds to a process's first finished step.
        type: integer
        format: int32
        minimum: 1
        maximum: 2592000
        default: 600
      stepSeconds:
        description: Seconds for one step.
        type: integer
        format: int32
        minimum: 1
        maximum: 2592000
        default: 300
      snapshotSeconds:
        description: Seconds for one snapshot.
        type: integer
        format: int32
        minimum: 1
        maximum: 2592000
        default: 600
      outputSeconds:
        description: Seconds without a line of any rank. Unset = no limit.
        type: integer
        format: int32
        minimum: 1
        maximum: 2592000
  output:
    description: >-
      How the program prints its numbers: Python regular expressions with one group, the number,
      for lines of rank 0. Shown where our library reports none; they decide nothing. Usual forms,
      such as progress bars, are read without. Needs our launcher. A change holds for later pods.
    type: object
    properties:
      step:
        description: Finished steps, for example "iter (\d+)".
        type: string
        minLength: 1
        maxLength: 256
      totalSteps:
        description: Steps at which training ends.
        type: string
        minLength: 1
        maxLength: 256
      loss:
        description: Loss of that step.
        type: string
        minLength: 1
        maxLength: 256
      metrics:
        description: >-
          Further numbers by name, such as accuracy; a name has at most 40 letters, digits and
          _./@-.
        type: object
        maxProperties: 16
        additionalProperties:
          type: string
          minLength: 1
          maxLength: 256
      forms:
        description: >-
          Never: only these expressions are read.
        type: string
        enum: [Auto, Never]
  nodeLost:
    description: What to do when a node stops answering while it runs a replica.
    type: object
    default: {}
    properties:
      policy:
        description: >-
          Wait: the gang restarts once the node or an administrator has confirmed that the pod is
          gone. Fence: the pod is deleted by force after afterSeconds; a process that still runs
          can write no valid snapshot. Fence needs spec.snapshot and does not protect files that a
          script writes itself.
        type: string
        enum: [Wait, Fence]
        default: Wait
      afterSeconds:
        description: >-
          Seconds that a node may be not Ready before Fence acts. Kubernetes needs about 50 s to
          notice a dead node.
        type: integer
        format: int32
        minimum: 1
        maximum: 86400
        default: 30
  startupDeadlineSeconds:
    description: >-
      Seconds from the first pod's creation until each has a node, and from then until all
      replicas run. Past it everything is released and retried; charged unless the job waited for
      capacity, quota or a node that is not ready, or the cluster refused a pod.
    type: integer
    format: int32
    minimum: 1
    maximum: 2592000
    default: 600
  activeDeadlineSeconds:
    description: >-
      Seconds that the job may be active, restarts included, before it fails. Unset: no limit.
    type: integer
    format: int64
    minimum: 1
    maximum: 3153600000
  ttlSecondsAfterFinished:
    description: >-
      Seconds after the end until the DDPJob and all that belongs to it are deleted. 0: at once.
      Unset: it stays.
    type: integer
    format: int32
    minimum: 0
    maximum: 2147483647
  cleanPodPolicy:
    description: >-
      Pods removed when the job ends. Running: those that still run. All: finished ones too, with
      their logs. Immutable.
    type: string
    enum: [Running, All]
    default: Running
    x-kubernetes-validations:
      - rule: self == oldSelf
        message: "spec.cleanPodPolicy is immutable: create a new DDPJob"
  metrics:
    description: Where the launcher serves /metrics, /healthz and /state.
    type: object
    default: {}
    properties:
      port:
        description: >-
          Port in every pod, 1024 to 65535, other than spec.port. With hostNetwork the default
          means a port from 25000 to 29999, drawn by each replica for each attempt. Immutable.
        type: integer
        format: int32
        minimum: 1024
        maximum: 65535
        default: 9400
        x-kubernetes-validations:
          - rule: self == oldSelf
            message: "spec.metrics.port is immutable: create a new DDPJob"
  networkPolicy:
    description: Protection of the gang's ports.
    type: object
    default: {}
    properties:
      enabled:
        description: >-
          Whether a NetworkPolicy lets only members of the gang reach each other's ports, and
          everyone (or the clients of the operator's --metrics-from) the metrics port and ports
          that the template declares, but for spec.port. Immutable.
        type: boolean
        default: true
        x-kubernetes-validations:
          - rule: self == oldSelf
            message: "spec.networkPolicy.enabled is immutable: create a new DDPJob"
{{- end }}
