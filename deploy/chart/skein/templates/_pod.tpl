{{- define "skein.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* What both the agent's container and the ones before it may do: links, routes, probes, and entering pods' namespaces. */}}
{{- define "skein.rights" -}}
{{- if .Values.privileged -}}
privileged: true
{{- else -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
  add: [NET_ADMIN, NET_RAW, SYS_ADMIN, SYS_PTRACE]
{{- end }}
readOnlyRootFilesystem: true
runAsUser: 0
{{- end }}

{{- define "skein.mounts" -}}
- {name: state, mountPath: /var/lib/skein}
- {name: run, mountPath: /run/skein}
- {name: config, mountPath: /etc/skein, readOnly: true}
- {name: netns, mountPath: /run/netns, mountPropagation: HostToContainer}
- {name: netns, mountPath: /var/run/netns, mountPropagation: HostToContainer} # as runtimes call it
- {name: tun, mountPath: /dev/net/tun}
{{- if .Values.cni.enabled }}
- {name: cni-bin, mountPath: {{ .Values.cni.binDir }}}
- {name: cni-conf, mountPath: {{ .Values.cni.confDir }}}
{{- end }}
{{- end }}

{{- /* One DaemonSet. Takes root (the chart), name, join (agent or server). */}}
{{- define "skein.daemonset" -}}
{{- $ := .root -}}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ .name }}
  namespace: {{ $.Release.Namespace }}
  labels: {app.kubernetes.io/name: skein, app.kubernetes.io/component: {{ .join }}}
spec:
  selector:
    matchLabels: {app.kubernetes.io/name: skein, app.kubernetes.io/component: {{ .join }}}
  updateStrategy:
    type: RollingUpdate
    rollingUpdate: {maxUnavailable: {{ if $.Values.clean }}100%{{ else }}{{ $.Values.updateStrategy.maxUnavailable }}{{ end }}}
  template:
    metadata:
      labels: {app.kubernetes.io/name: skein, app.kubernetes.io/component: {{ .join }}}
      annotations:
        skein.dev/config-sum: {{ printf "%s%s" (toYaml $.Values.config) (toYaml $.Values.cni) | sha256sum }} # a changed configuration starts the agents anew
    spec:
      serviceAccountName: {{ if eq .join "server" }}skein-admin{{ else }}skein-agent{{ end }}
      hostNetwork: true
      dnsPolicy: Default # the host's: there may be no other without the mesh
      priorityClassName: {{ $.Values.priorityClassName }}
      terminationGracePeriodSeconds: 30
      tolerations:
        {{- toYaml $.Values.tolerations | nindent 8 }}
      {{- with $.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- range . }}
        - name: {{ . }}
        {{- end }}
      {{- end }}
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
              - matchExpressions:
                  - {key: {{ $.Values.servers.label }}, operator: {{ if eq .join "server" }}Exists{{ else }}DoesNotExist{{ end }}}
                  {{- if ne .join "server" }}
                  {{- range $k, $v := $.Values.agents.nodeSelector }}
                  - {key: {{ $k }}, operator: In, values: [{{ $v | quote }}]}
                  {{- end }}
                  {{- end }}
      securityContext:
        {{- /* The runtimes' own AppArmor profile forbids mounting, which egress gateways do. */}}
        appArmorProfile: {type: Unconfined}
        seccompProfile: {type: RuntimeDefault}
      {{- if $.Values.clean }}
      initContainers:
        {{- if $.Values.cni.enabled }}
        - name: cni
          image: {{ include "skein.image" $ }}
          imagePullPolicy: {{ $.Values.image.pullPolicy }}
          args: [cni, remove, --bin-dir, {{ $.Values.cni.binDir }}, --conf-dir, {{ $.Values.cni.confDir }}]
          securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, runAsUser: 0, capabilities: {drop: [ALL]}}
          volumeMounts:
            {{- include "skein.mounts" $ | nindent 12 }}
        {{- end }}
        - name: clean
          image: {{ include "skein.image" $ }}
          imagePullPolicy: {{ $.Values.image.pullPolicy }}
          args: [down, --purge, --forget]
          securityContext:
            {{- include "skein.rights" $ | nindent 12 }}
          volumeMounts:
            {{- include "skein.mounts" $ | nindent 12 }}
      containers:
        - name: cleaned
          image: {{ include "skein.image" $ }}
          imagePullPolicy: {{ $.Values.image.pullPolicy }}
          args: [down, --wait]
          securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
      {{- else }}
      containers:
        - name: agent
          image: {{ include "skein.image" $ }}
          imagePullPolicy: {{ $.Values.image.pullPolicy }}
          args: [up, --join-kubernetes, {{ .join }}]
          env:
            - name: SKEIN_NODE # the Node that this host is
              valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
            {{- with $.Values.apiserver.host }}
            - {name: KUBERNETES_SERVICE_HOST, value: {{ . | quote }}}
            - {name: KUBERNETES_SERVICE_PORT, value: {{ $.Values.apiserver.port | quote }}}
            {{- end }}
          securityContext:
            {{- include "skein.rights" $ | nindent 12 }}
          resources:
            {{- toYaml $.Values.resources | nindent 12 }}
          # Joining may have to wait for the first server. The agent answers from then on.
          startupProbe: {httpGet: {host: 127.0.0.1, port: 9469, path: /healthz}, periodSeconds: 1, failureThreshold: 600}
          readinessProbe: {httpGet: {host: 127.0.0.1, port: 9469, path: /readyz}, periodSeconds: 2, failureThreshold: 3}
          livenessProbe: {httpGet: {host: 127.0.0.1, port: 9469, path: /healthz}, periodSeconds: 10, failureThreshold: 6, timeoutSeconds: 5}
          volumeMounts:
            {{- include "skein.mounts" $ | nindent 12 }}
      {{- end }}
      volumes:
        - {name: state, hostPath: {path: /var/lib/skein, type: DirectoryOrCreate}}
        - {name: run, hostPath: {path: /run/skein, type: DirectoryOrCreate}}
        - {name: config, configMap: {name: skein-config}}
        - {name: netns, hostPath: {path: /run/netns, type: DirectoryOrCreate}}
        - {name: tun, hostPath: {path: /dev/net/tun, type: CharDevice}}
        {{- if $.Values.cni.enabled }}
        - {name: cni-bin, hostPath: {path: {{ $.Values.cni.binDir }}, type: DirectoryOrCreate}}
        - {name: cni-conf, hostPath: {path: {{ $.Values.cni.confDir }}, type: DirectoryOrCreate}}
        {{- end }}
{{- end }}
