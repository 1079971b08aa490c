{{- define "elastic.name" -}}
{{- printf "%s-operator" .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "elastic.labels" -}}
app.kubernetes.io/name: elastic-runtime
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "elastic.selector" -}}
app.kubernetes.io/name: elastic-runtime
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "elastic.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end -}}

{{- /* The namespaces whose jobs are looked after, as JSON. */ -}}
{{- define "elastic.namespaces" -}}
{{- if .Values.namespaces }}{{ .Values.namespaces | toJson }}{{ else }}{{ list .Release.Namespace | toJson }}{{ end -}}
{{- end -}}

{{- /* It looks after its own namespace where none is named, and has its Lease there. */ -}}
{{- define "elastic.arguments" -}}
{{- $arguments := list "--health-address" "$(POD_IP)" "--health-port" (.Values.metrics.port | toString) -}}
{{- range .Values.namespaces }}{{ $arguments = concat $arguments (list "--namespace" .) }}{{ end -}}
{{- if .Values.nodes.taint }}{{ $arguments = append $arguments "--allow-node-taint" }}{{ end -}}
{{- $arguments | toJson -}}
{{- end -}}
