{{- define "motet.name" -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- end -}}

{{- define "motet.labels" -}}
app.kubernetes.io/name: motet
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "motet.selector" -}}
app.kubernetes.io/name: motet
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "motet.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "motet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* Of preStop, the drain, and the end of the process. */ -}}
{{- define "motet.grace" -}}{{ add .drain 30 }}{{- end -}}

{{- define "motet.maxWorkers" -}}
{{ ternary .Values.autoscaling.maxReplicas .Values.worker.replicas .Values.autoscaling.enabled }}
{{- end -}}

{{- define "motet.table" -}}
{{- range $key, $value := . }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end -}}
