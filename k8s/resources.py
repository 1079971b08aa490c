"""ElasticJob's place in the API."""

from elastic.k8s.kernel.resources import Resource

ELASTICJOBS = Resource(
    group="elastic-runtime.dev", version="v1alpha1", kind="ElasticJob", plural="elasticjobs"
)
