package e2e

import (
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"
)

const (
	chart = "../charts/caddy-openai-lb"
	// oldest is the first version of Kubernetes that the chart is for.
	oldest = 31
	newest = 37
)

// packageChart returns the file that a release publishes.
var packageChart = sync.OnceValues(func() (string, error) {
	if output, err := exec.Command("../release/chart", "0.1.0", shared).CombinedOutput(); err != nil {
		return "", fmt.Errorf("release/chart: %w\n%s", err, output)
	}
	return filepath.Join(shared, "caddy-openai-lb-0.1.0.tgz"), nil
})

// helm runs a command with the packaged chart, and returns what it prints.
func helm(t *testing.T, command string, arguments ...string) (string, error) {
	t.Helper()
	program := tool(t, "helm")
	archive, err := packageChart()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, append([]string{command, archive}, arguments...)...)
	if command == "template" {
		cmd.Args = slices.Insert(cmd.Args, 2, "llm")
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	output, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("helm %s %v: %w\n%s", command, arguments, err, stderr.String())
	}
	return string(output), err
}

// objects are what the chart makes, by kind and name.
type objects map[string]any

// kinds has what the API of Kubernetes makes of each.
var kinds = map[string]func() any{
	"ConfigMap":               func() any { return new(corev1.ConfigMap) },
	"Deployment":              func() any { return new(appsv1.Deployment) },
	"HTTPRoute":               func() any { return new(gatewayv1.HTTPRoute) },
	"HorizontalPodAutoscaler": func() any { return new(autoscalingv2.HorizontalPodAutoscaler) },
	"Ingress":                 func() any { return new(networkingv1.Ingress) },
	"NetworkPolicy":           func() any { return new(networkingv1.NetworkPolicy) },
	"Pod":                     func() any { return new(corev1.Pod) },
	"PodDisruptionBudget":     func() any { return new(policyv1.PodDisruptionBudget) },
	"PrometheusRule":          func() any { return new(monitoringv1.PrometheusRule) },
	"Service":                 func() any { return new(corev1.Service) },
	"ServiceAccount":          func() any { return new(corev1.ServiceAccount) },
	"ServiceMonitor":          func() any { return new(monitoringv1.ServiceMonitor) },
}

// render returns the objects, each of which has only fields of its kind, and
// their text.
func render(t *testing.T, arguments ...string) (objects, string) {
	t.Helper()
	text, err := helm(t, "template", append([]string{"--kube-version", fmt.Sprintf("1.%d.0", oldest)}, arguments...)...)
	if err != nil {
		t.Fatal(err)
	}
	made := make(objects)
	for document := range strings.SplitSeq(text, "---\n# Source: ") {
		if strings.TrimSpace(document) == "" {
			continue
		}
		_, document, _ = strings.Cut(document, "\n")
		var meta metav1.PartialObjectMetadata
		if err := yaml.Unmarshal([]byte(document), &meta); err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		kind, ok := kinds[meta.Kind]
		if !ok {
			t.Fatalf("a %q in\n%s", meta.Kind, document)
		}
		object := kind()
		if err := yaml.UnmarshalStrict([]byte(document), object); err != nil {
			t.Fatalf("%s %s: %v", meta.Kind, meta.Name, err)
		}
		made[meta.Kind+" "+meta.Name] = object
	}
	return made, text
}

// only returns the first object of its type, or the first that has this end of
// a name.
func only[T any](t *testing.T, made objects, name ...string) *T {
	t.Helper()
	for _, key := range slices.Sorted(maps.Keys(made)) {
		object, ok := made[key].(*T)
		if ok && (len(name) == 0 || strings.HasSuffix(key, name[0])) {
			return object
		}
	}
	t.Fatalf("the chart makes no %T %v", *new(T), name)
	return nil
}

// setsOfValues are the files of values that the chart is tried with, also those
// that an import makes.
func setsOfValues(t *testing.T) []string {
	t.Helper()
	sets, err := filepath.Glob(chart + "/ci/*-values.yaml")
	imported, importedErr := filepath.Glob("../modules/tools/testdata/import/*.values")
	if err != nil || importedErr != nil || len(sets) < 6 || len(imported) < 2 {
		t.Fatalf("found %v, %v: %v, %v", sets, imported, err, importedErr)
	}
	return append(sets, imported...)
}

func TestHelmFindsNothingWrongWithTheChart(t *testing.T) {
	t.Parallel()
	for _, set := range setsOfValues(t) {
		if output, err := helm(t, "lint", "--strict", "--kube-version", fmt.Sprintf("1.%d.0", oldest), "--values", set); err != nil {
			t.Errorf("%v\n%s", err, output)
		}
	}
}

// TestEachKubernetesTakesWhatTheChartMakes needs the program
// kubernetes-validate, which has the API of each version.
func TestEachKubernetesTakesWhatTheChartMakes(t *testing.T) {
	t.Parallel()
	validate := tool(t, "kubernetes-validate")
	dir := t.TempDir()
	var files []string
	for _, set := range setsOfValues(t) {
		_, text := render(t, "--values", set)
		files = append(files, filepath.Join(dir, filepath.Base(set)))
		writeFile(t, files[len(files)-1], text)
	}
	// these belong to no version of Kubernetes, and render has checked them
	others := regexp.MustCompile(`Couldn't find schema for kind (ServiceMonitor|PrometheusRule|HTTPRoute) `)
	for version := oldest; version <= newest; version++ {
		arguments := append([]string{"--strict", "--kubernetes-version", fmt.Sprintf("1.%d", version)}, files...)
		output, err := exec.Command(validate, arguments...).CombinedOutput()
		if err != nil {
			t.Errorf("1.%d: %v\n%s", version, err, output)
		}
		valid := 0
		for line := range strings.Lines(string(output)) {
			switch {
			case strings.HasPrefix(line, "INFO "):
				valid++
			case !others.MatchString(line):
				t.Errorf("1.%d: %s", version, line)
			}
		}
		if valid < 6*len(files) {
			t.Errorf("1.%d: %d objects are valid, expected many more:\n%s", version, valid, output)
		}
	}
}

func TestWhatTheChartMakesFitsTogether(t *testing.T) {
	t.Parallel()
	for _, set := range setsOfValues(t) {
		t.Run(strings.TrimSuffix(filepath.Base(set), "-values.yaml"), func(t *testing.T) {
			t.Parallel()
			made, _ := render(t, "--values", set)
			checkSelectors(t, made)
			checkSecurity(t, only[appsv1.Deployment](t, made).Spec.Template.Spec)
			checkSecurity(t, only[corev1.Pod](t, made).Spec)
		})
	}
}

// checkSelectors checks which objects select the pods of the Deployment, and
// that none selects the pod of `helm test`.
func checkSelectors(t *testing.T, made objects) {
	t.Helper()
	deployment, test := only[appsv1.Deployment](t, made), only[corev1.Pod](t, made)
	selectors := map[string]*metav1.LabelSelector{"the Deployment": deployment.Spec.Selector}
	ports := make(map[string]bool)
	for _, port := range deployment.Spec.Template.Spec.Containers[0].Ports {
		ports[port.Name] = true
	}
	for key, object := range made {
		switch object := object.(type) {
		case *corev1.Service:
			selectors[key] = &metav1.LabelSelector{MatchLabels: object.Spec.Selector}
			if port := object.Spec.Ports[0].TargetPort.StrVal; !ports[port] {
				t.Errorf("%s leads to the port %q", key, port)
			}
		case *policyv1.PodDisruptionBudget:
			selectors[key] = object.Spec.Selector
		case *networkingv1.NetworkPolicy:
			selectors[key] = &object.Spec.PodSelector
			for _, rule := range object.Spec.Ingress {
				if port := rule.Ports[0].Port.StrVal; !ports[port] {
					t.Errorf("%s lets in to the port %q", key, port)
				}
			}
			if clients := object.Spec.Ingress[0].From; clients != nil && !slices.ContainsFunc(clients, func(peer networkingv1.NetworkPolicyPeer) bool {
				return selects(peer.PodSelector, test.Labels)
			}) {
				t.Errorf("%s does not let `helm test` in", key)
			}
		case *autoscalingv2.HorizontalPodAutoscaler:
			if object.Spec.ScaleTargetRef.Name != deployment.Name || deployment.Spec.Replicas != nil {
				t.Errorf("%s scales %s, and the Deployment %s has %v replicas", key, object.Spec.ScaleTargetRef.Name, deployment.Name, deployment.Spec.Replicas)
			}
		case *monitoringv1.ServiceMonitor:
			for _, name := range slices.Sorted(maps.Keys(made)) {
				service, ok := made[name].(*corev1.Service)
				if ok && selects(&object.Spec.Selector, service.Labels) != (service.Spec.Ports[0].Name == object.Spec.Endpoints[0].Port) {
					t.Errorf("the ServiceMonitor selects %v, %s has %v", object.Spec.Selector, name, service.Labels)
				}
			}
		}
	}
	for who, selector := range selectors {
		if !selects(selector, deployment.Spec.Template.Labels) || selects(selector, test.Labels) {
			t.Errorf("%s selects %v, pods are %v, that of `helm test` is %v", who, selector.MatchLabels, deployment.Spec.Template.Labels, test.Labels)
		}
	}
	address := only[corev1.Pod](t, made).Spec.Containers[0].Command[4]
	for key, object := range made {
		service, ok := object.(*corev1.Service)
		wanted := ok && service.Spec.ClusterIP != corev1.ClusterIPNone
		if wanted && address != fmt.Sprintf("%s://%s:%d/readyz", service.Spec.Ports[0].Name, service.Name, service.Spec.Ports[0].Port) {
			t.Errorf("`helm test` asks %s, %s has %+v", address, key, service.Spec.Ports)
		}
	}
}

func selects(selector *metav1.LabelSelector, labels map[string]string) bool {
	if selector == nil {
		return false
	}
	for name, value := range selector.MatchLabels {
		if labels[name] != value {
			return false
		}
	}
	return len(selector.MatchLabels) > 0
}

// checkSecurity checks that a pod gets by under the policy `restricted` of
// Kubernetes, and has no token.
func checkSecurity(t *testing.T, pod corev1.PodSpec) {
	t.Helper()
	security, container := pod.SecurityContext, pod.Containers[0].SecurityContext
	if pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken || !*security.RunAsNonRoot ||
		security.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault || !*container.ReadOnlyRootFilesystem ||
		*container.AllowPrivilegeEscalation || !slices.Equal(container.Capabilities.Drop, []corev1.Capability{"ALL"}) {
		t.Errorf("the pod may do more than it needs: %+v, %+v", security, container)
	}
	for _, capability := range container.Capabilities.Add {
		if capability != "NET_BIND_SERVICE" {
			t.Errorf("the pod has the capability %s", capability)
		}
	}
}
