{{/* Schema of status. The operator alone writes it. */}}

{{- define "ddpjob.crd.failure" -}}
type: object
properties:
  attempt:
    description: Attempt in which it happened, from 1.
    type: integer
    format: int32
  round:
    description: Round within the attempt that it ended, from 0.
    type: integer
    format: int32
  replica:
    description: Replica that failed first, by the number in the pod's name.
    type: integer
    format: int32
  rank:
    description: Rank that failed first, if known.
    type: integer
    format: int32
  pod:
    description: Name of the pod.
    type: string
    maxLength: 4096
  node:
    description: Kubernetes node that the pod ran on.
    type: string
    maxLength: 4096
  class:
    description: >-
      Kind of failure. Permanent, Diverged and Invalid end the job; Hardware, Infrastructure and
      Disruption are not charged to maxRestarts.
    type: string
    enum: [Permanent, Hardware, Diverged, OOM, Hang, Killed, User, Infrastructure, Disruption, Startup, Deadline, Invalid]
  reason:
    description: Short cause, for example Error, OOMKilled, Evicted, PodDeleted.
    type: string
    maxLength: 4096
  chargedTo:
    description: Budget that it was charged to.
    type: string
    enum: [maxRestarts, maxDisruptions]
  charge:
    description: How much of that budget was then used up.
    type: integer
    format: int32
  exitCode:
    description: Exit code of the trainer container; 128+n is death by signal n.
    type: integer
    format: int32
  signal:
    description: Number of the signal that ended the process.
    type: integer
    format: int32
  message:
    description: >-
      What the trainer reported: the exception and the last lines of its log, shortened. Unchecked
      text from the container.
    type: string
    maxLength: 4096
  detectedAt:
    description: When the operator saw it, UTC.
    type: string
    format: date-time
  inPlace:
    description: >-
      true: it ended only a round, and processes restarted in place.
    type: boolean
  replaced:
    description: >-
      true: only lost pods were replaced.
    type: boolean
  step:
    description: Steps that the process had finished, if known.
    type: integer
    format: int64
  exception:
    description: >-
      What ended it, in one line: the exception, the kubelet's message, the last line of an init
      container. Unchecked text from the container.
    type: string
    maxLength: 4096
{{- end }}

{{- define "ddpjob.crd.status" -}}
description: What the operator observed and decided. Only the operator writes it.
type: object
# Who waits for the operator's first word must not take its absence for success.
default: {observedGeneration: -1}
properties:
  observedGeneration:
    description: >-
      metadata.generation that this status speaks about; -1 before the operator has seen the job.
    type: integer
    format: int64
  phase:
    description: >-
      Pending (nothing created yet), Starting (pods are being created), Running (all replicas
      run), Restarting (some or all pods are being replaced), Suspended, Succeeded or Failed. The
      last two are final.
    type: string
    enum: [Pending, Starting, Running, Restarting, Suspended, Succeeded, Failed]
  reason:
    description: >-
      Reason of a true condition Failed, Invalid or Stalled, or of the failure after which pods
      restart.
    type: string
    maxLength: 1024
  message:
    description: >-
      The same in a few words: the exception, or the beginning and the end of the condition's
      message.
    type: string
    maxLength: 4096
  stalled:
    description: What the condition Stalled says, as data for the operator.
    type: object
    properties:
      known:
        description: Cause, or Cure where a person can end the wait. Absent while neither is known.
        type: string
        enum: [Cause, Cure]
      until:
        description: So long the other pods wait for a replacement, UTC.
        type: string
        format: date-time
  conditions:
    description: >-
      Ready (true while the phase is Running or Succeeded), Running, Complete, Failed, Suspended,
      Stalled (something outside delays it, such as QuotaExceeded; or it has failed), Invalid (no
      pod can be created from the spec), ResumeProven (whether steps repeated after a restart in
      place were equal bit for bit), Straggling, Silent, Apart and Unsupported (this version
      ignores a field that is set).
    type: array
    maxItems: 32
    x-kubernetes-list-type: map
    x-kubernetes-list-map-keys: [type]
    items:
      type: object
      required: [type, status, lastTransitionTime, reason, message]
      properties:
        type:
          description: Name of the condition.
          type: string
          maxLength: 316
        status:
          description: "True, False or Unknown."
          type: string
          enum: ["True", "False", Unknown]
        reason:
          description: Cause of the last change, one word in CamelCase.
          type: string
          minLength: 1
          maxLength: 1024
          pattern: ^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$
        message:
          description: The cause in words. It may be empty.
          type: string
          maxLength: 32768
        lastTransitionTime:
          description: When status last changed, UTC.
          type: string
          format: date-time
        observedGeneration:
          description: metadata.generation that the condition speaks about.
          type: integer
          format: int64
          minimum: 0
  attempt:
    description: >-
      Number of the current attempt, from 1. Every creation of pods (start, restart, resume,
      replacement) takes a new one.
    type: integer
    format: int32
    minimum: 0
    maximum: 1000000000
  membersSince:
    description: >-
      Lowest attempt whose pods are members of the gang. Pods of older attempts are deleted.
    type: integer
    format: int32
    minimum: 0
    maximum: 1000000000
  podGroup:
    description: >-
      Name of the PodGroup by which all pods of the attempt are placed at once; absent without one.
    type: string
    maxLength: 253
  births:
    description: >-
      The same for pods that were replaced since, for example "1:5,7:6": that of replica 1 in attempt 5.
      At most 256; then the whole gang restarts.
    type: string
    maxLength: 4096
  holds:
    description: >-
      true: the launchers of all replicas have said that they wait while a lost pod is replaced.
    type: boolean
  serving:
    description: >-
      Replicas whose place a standby took, for example "1:3": replica 1 is served by the pod that
      ends in -3.
    type: string
    maxLength: 4096
  templateHash:
    description: Hash of the spec that the current attempt's pods were made from.
    type: string
    maxLength: 128
  snapshotHash:
    description: Hash of spec.snapshot.volume, which that attempt's pods mount.
    type: string
    maxLength: 128
  ready:
    description: Ready replicas of all, for example "2/3"; absent once the job has ended.
    type: string
    maxLength: 32
  restarted:
    description: >-
      Restarts of the gang and, after a plus, those in place, for example "1+25"; "0" before any.
    type: string
    maxLength: 32
  restarts:
    description: How often the gang came back.
    type: object
    properties:
      total:
        description: Restarts of the gang, whatever the cause.
        type: integer
        format: int32
      replaced:
        description: Those of total in which only lost pods were replaced.
        type: integer
        format: int32
      charged:
        description: Restarts charged to maxRestarts since it was last reset.
        type: integer
        format: int32
      inPlace:
        description: Restarts in place, of all attempts.
        type: integer
        format: int32
      round:
        description: >-
          Number of the current round as far as it is known: so many ends of rounds since replica
          0's pod was made are counted.
        type: integer
        format: int32
      disruptions:
        description: Restarts counted against maxDisruptions since it was last reset.
        type: integer
        format: int32
      consecutive:
        description: Restarts in a row without progress.
        type: integer
        format: int32
      released:
        description: >-
          Tries in a row that were released before all replicas ran. They cost no restart.
        type: integer
        format: int32
      snapshotStep:
        description: >-
          Step of the newest committed snapshot known at the last restart. A newer one heals the
          budget.
        type: integer
        format: int64
      fileModifiedAt:
        description: >-
          Newest time of modification at restart.progressPath known at the last restart, in
          UTC of the file server. A newer one heals the budget.
        type: string
        format: date-time
  replicas:
    description: Replicas of the current attempt by state.
    type: object
    properties:
      desired:
        description: Replicas that the gang needs, as spec.replicas says.
        type: integer
        format: int32
      active:
        description: Pods that exist and have not ended.
        type: integer
        format: int32
      ready:
        description: Replicas whose trainer container runs and is ready.
        type: integer
        format: int32
      succeeded:
        description: Replicas whose trainer container ended with exit code 0.
        type: integer
        format: int32
      failed:
        description: Replicas whose trainer container failed.
        type: integer
        format: int32
  succeededReplicas:
    description: Replicas of the current attempt that succeeded, as ranges, for example "0-2,5".
    type: string
    maxLength: 32768
  progress:
    description: What replica 0's trainer reported last. Absent without our launcher.
    type: object
    properties:
      step:
        description: Finished training steps.
        type: integer
        format: int64
      totalSteps:
        description: Steps at which training ends.
        type: integer
        format: int64
      stepOfTotal:
        description: >-
          Both, for example "458/100000"; the step alone where the total is unknown. For a program
          that reports no steps, what it has printed.
        type: string
        maxLength: 64
      metrics:
        description: Numbers that the program gave run.log() or prints (spec.output), at most 8.
        type: object
        maxProperties: 8
        additionalProperties:
          type: number
      printedStep:
        description: Step that a program without our library has printed; see spec.output.
        type: integer
        format: int64
      printedTotalSteps:
        description: Steps at which training ends, as printed.
        type: integer
        format: int64
      loss:
        description: Mean loss of that step over all processes, if finite.
        type: number
      samplesPerSecond:
        description: Samples per second of the whole gang.
        type: number
      stepsPerSecond:
        description: Steps per second of the last minute.
        type: number
      snapshotStep:
        description: >-
          Step of the newest snapshot that another rank has read back; if only an object store
          outlives the pod, that was uploaded.
        type: integer
        format: int64
      snapshotEvery:
        description: Steps between snapshots that the trainer chose.
        type: integer
        format: int64
      fileModifiedAt:
        description: >-
          Newest time of modification at restart.progressPath, in UTC of the file server.
        type: string
        format: date-time
      resumed:
        description: >-
          Whose snapshot training began from, if another DDPJob's or made by another script or
          arguments.
        type: string
        maxLength: 4096
      updatedAt:
        description: When the trainer reported it, UTC.
        type: string
        format: date-time
  lastFailure:
    description: The newest failure, with its cause and place.
    {{- include "ddpjob.crd.failure" . | nindent 4 }}
  failures:
    description: >-
      The last 10 failures, oldest first: what ended an attempt or, with inPlace, a round.
    type: array
    maxItems: 10
    x-kubernetes-list-type: atomic
    items:
      {{- include "ddpjob.crd.failure" . | nindent 6 }}
  avoidedNodes:
    description: >-
      Nodes on which a GPU failed or a container could not start, or which were about to go, the
      newest last. New pods avoid them until no other node has room or the job is resumed.
    type: array
    maxItems: 16
    x-kubernetes-list-type: set
    items:
      type: string
      maxLength: 253
  handedOver:
    description: >-
      Nodes that were about to go, each with the signal. Each has one try. Empty after a resume.
    type: array
    maxItems: 32
    x-kubernetes-list-type: atomic
    items:
      type: string
      maxLength: 640
  goodput:
    description: Productive share, 0 to 1, of all podSeconds but waiting.
    type: number
  eta:
    description: Estimated end of training, from the present rate and the cost of failures so far.
    type: object
    properties:
      at:
        description: When training is expected to end, UTC.
        type: string
        format: date-time
      remaining:
        description: Time until then, for example "1h20m".
        type: string
        maxLength: 32
  ledger:
    description: >-
      Where the time of the job's pods went, in pod-seconds from since to until. Time suspended,
      without pods, does not count.
    type: object
    properties:
      since:
        description: When the ledger began, UTC.
        type: string
        format: date-time
      until:
        description: When it was last updated, UTC.
        type: string
        format: date-time
      podSeconds:
        description: >-
          By state: productive, repeated (steps done again), data (waiting for input), snapshot,
          warmup (up to the first step), recovering (after a failure), held (while another pod is
          replaced), starting (image, volumes, containers), waiting (for a node or a quota), idle
          (after its end, or standby), unknown.
        type: object
        additionalProperties: {type: number}
        maxProperties: 32
      recovering:
        description: Those of recovering, by class of the failure; Drill is a planned round.
        type: object
        additionalProperties: {type: number}
        maxProperties: 32
      hub:
        description: The account of replica 0's launcher as far as it is in the sums.
        type: object
        properties:
          attempt:
            description: Attempt in which that pod was made.
            type: integer
            format: int32
          startedAt:
            description: When that launcher started, by the operator's clock.
            type: string
            format: date-time
          seconds:
            description: Its seconds by state, and up, all of them.
            type: object
            additionalProperties: {type: number}
            maxProperties: 32
  timings:
    description: Points in time (UTC, of the operator's clock) and durations.
    type: object
    properties:
      startedAt:
        description: When the first pods were created; again after each resume.
        type: string
        format: date-time
      attemptStartedAt:
        description: When the current attempt was decided.
        type: string
        format: date-time
      placedAt:
        description: >-
          When a pod of the attempt's PodGroup was first seen on a node; the startup deadline
          counts from here.
        type: string
        format: date-time
      runningAt:
        description: When all replicas of the current attempt ran.
        type: string
        format: date-time
      lastRoundAt:
        description: When the operator last saw a restart in place of this attempt.
        type: string
        format: date-time
      nextRestartAt:
        description: The next attempt is not created before this time (back-off).
        type: string
        format: date-time
      replacingSince:
        description: >-
          When the first pod now being replaced was lost. All pods restart restart.replaceSeconds
          later.
        type: string
        format: date-time
      completedAt:
        description: When the job succeeded or failed.
        type: string
        format: date-time
      lastRecoverySeconds:
        description: Seconds of the last outage, from the last known step to all replicas running.
        type: number
  operator:
    description: >-
      The operator that acts on the job, and another release that asks whether it lives (condition
      Stalled, reason OtherOperator).
    type: object
    properties:
      lease:
        description: Namespace and name of its Lease.
        type: string
        maxLength: 400
      version:
        description: Its version at the last write.
        type: string
        maxLength: 64
      other:
        description: Namespace and name of the Lease of the one that asks.
        type: string
        maxLength: 400
      asked:
        description: When that one asked, by its own clock. Without an answer it takes the job over.
        type: string
        format: date-time
      answered:
        description: When this one answered, by its own clock.
        type: string
        format: date-time
{{- end }}
